"""One module per command: `add_arguments(parser)`, and `run(options, config)`, which returns the exit status.

No command imports another; what several need is in the modules that begin with an underscore.
"""
