"""Making data files: `tasks` for known raw data, `conversion` for records of any layout, `files` to read and write.

The command line is `rl-plugins prepare`.
"""
