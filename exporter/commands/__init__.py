"""One module per command: `add_arguments(parser)`, and `run(options, config)`, which returns the exit status.

`run` raises `ConfigError`, `CommandError` or `OSError` for `exporter.cli` to report: what the user gave is
invalid, cannot be read or cannot be listened on. No command imports another; modules that begin with an
underscore hold the parts that several share.
"""
