"""Functions to write from two of their values, such as `f(0)=37 f(1)=44` for `7*x+37`, with tests for a sandbox."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from rl_plugins.data.parquet import prompt_row
from rl_plugins.data.prepare.files import RowList
from rl_plugins.data.prepare.splits import choose_splits

SIZES = {"train": 768, "dev": 32, "test": 96}
"""Rows of each split."""
SLOPES, CONSTANTS = range(1, 10), range(100)
SHOWN, TESTED = (0, 1), (0, 7)
"""Arguments in the prompt, and arguments of the tests. Only the right function passes both tests."""


def program_splits(sizes: Mapping[str, int], seed: int) -> dict[str, RowList]:
    """Return functions as prompts, and the split `sft` with programs. The ground truth of a row has two tests.

    Args:
        sizes: number of rows of `train`, `dev` and `test`.
        seed: seed of the choice.

    Returns:
        The rows of each split. No function comes twice in `train`, `dev` and `test`.

    Raises:
        ConfigError: a number is below 1, or there are fewer functions than rows.
    """
    lines = [(slope, constant) for slope in SLOPES for constant in CONSTANTS]
    chosen = choose_splits(lines, random.Random(seed), sizes)
    splits = {split: [_row(*line) for line in chosen_lines] for split, chosen_lines in chosen.items()}
    return {**splits, "sft": splits["train"]}


def _row(slope: int, constant: int) -> dict[str, Any]:
    shown = " ".join(f"f({x})={slope * x + constant}" for x in SHOWN)
    tests = {
        "inputs": [[x] for x in TESTED],
        "outputs": [slope * x + constant for x in TESTED],
        "fn_name": "f",
    }
    program = f"```\ndef f(x): return {slope}*x+{constant}\n```"
    return prompt_row(shown, json.dumps(tests), data_source="programs", ability="code", response=program)
