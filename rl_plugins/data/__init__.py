"""Data: prompts from parquet files, the order in which they are served, and the experience made from them.

`parquet` reads and checks prompt files with pyarrow alone and keeps the rows `on_disk`; `formats` knows what else rows
hold, and `validation` reports all that is wrong with them. `orders`, `mixture` and `curriculum` say which rows a step
takes, and `sampler` deals them to the ranks. `prompts`, `sft`, `preferences` and `process_rewards` are the Lightning
data modules; `experience` is what a rollout produces; `prepare` makes the files. Nothing is imported here, so that
checking a data file never waits for torch or Lightning.
"""
