"""The console script `rl-plugins`, with one module for each subcommand.

The docstring of a module is the help of its command. `add_arguments(parser)` declares the arguments, and
`run(arguments)` returns the exit status. Heavy libraries are imported inside `run`, after the arguments are checked.
"""
