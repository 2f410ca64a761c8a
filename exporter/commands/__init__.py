"""One module per command: `add_arguments(parser)`, and `run(options, config)`, which returns the exit status.

No command imports another; modules that begin with an underscore hold the parts that several share.
"""
