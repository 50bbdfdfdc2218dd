"""Make data files: one module for each known layout of raw data, and a conversion of any other.

A layout turns its raw data into rows of the five columns for the splits `train` and `test`; `conversion` goes by the
names of fields. Reading raw records, checking the rows and writing the parquet files are common; the command line is
`rl-plugins prepare`.
"""
