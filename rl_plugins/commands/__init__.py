"""The console script `rl-plugins`: one module for each subcommand.

A module's docstring is its help, `add_arguments(parser)` declares its arguments and `run(arguments)` returns the exit
status. What is heavy is imported inside `run`, after the arguments have been checked.
"""
