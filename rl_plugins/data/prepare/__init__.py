"""Making data files: `tasks` for known raw data, `conversion` for records of any layout, `files` to read and write.

`calculator`, `game` and `programs` make up the rows of the agent recipes, with the splits of `splits`. The
command line is `rl-plugins prepare`.
"""
