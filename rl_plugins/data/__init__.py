"""Data: rows of prompts, the order of training, tokenised batches, and the samples of an RL step.

`parquet` reads and checks prompt rows and keeps the rows `on_disk`; `formats` reads responses and labels of a row, and
`validation` reports every error of a file. `orders` and `curriculum` choose the rows of each step, and `loaders` split
each step among the ranks. `datamodule`, `sft`, `preferences` and `process_rewards` are the Lightning data modules;
`tokenization` and `prompts` make their token ids. `boxed` reads an answer in a box. `experience` holds
the samples of a rollout; `prepare` makes data files. This file imports nothing, so a check of a data file never waits
for torch or Lightning.
"""
