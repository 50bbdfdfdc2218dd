"""Make the prompt files: one module for each known layout of raw data, and a table of them.

A layout turns its raw data into rows of the five columns for the splits `train` and `test`; reading raw
files, checking the rows, writing the parquet files and the command line (`python -m rl_plugins.data.prepare`)
are common.
"""
