"""What the quickstart begins with: sums to solve, and a small model that knows nothing."""

from __future__ import annotations

from pathlib import Path

NUM_TRAIN, NUM_DEV, NUM_TEST = 1732, 256, 512
"""SFT stops by the dev rows, so that nothing is chosen by the test rows."""


def write_sums(folder: Path, seed: int) -> None:
    """`train`, `dev` and `test` of sums of numbers below 50, as parquet files."""
    from rl_plugins.data.prepare.files import write_splits
    from rl_plugins.data.prepare.tasks import addition_rows

    rows = addition_rows(below=50, num_train=NUM_TRAIN, num_dev=NUM_DEV, num_test=NUM_TEST, seed=seed)
    write_splits(rows, folder)


def save_base(folder: Path, seed: int) -> None:
    """The model and its tokenizer."""
    from rl_plugins.launch.quiet import quiet_libraries
    from rl_plugins.models.tiny import save_tiny_policy

    quiet_libraries()
    save_tiny_policy(folder, seed=seed)
