"""Data: prompts from parquet files, the order in which they are served, and the experience made from them.

`parquet` reads and checks prompt files with pyarrow alone; `sampler` is the resumable order of the steps;
`prompts` and `sft` are the Lightning data modules; `experience` is what a rollout produces; `prepare` makes
the files. Nothing is imported here, so that checking a data file never waits for torch or Lightning.
"""
