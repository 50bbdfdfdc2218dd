"""Products of numbers, which a tiny model cannot compute by itself, and conversations that compute them with a tool."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from rl_plugins.data.parquet import prompt_row
from rl_plugins.data.prepare.files import RowList
from rl_plugins.data.prepare.splits import choose_splits

SIZES = {"train": 2048, "dev": 64, "test": 256}
"""Rows of each split."""
TOOL, ARGUMENT = "calc", "x"
"""Name of the tool, and of its argument."""


def calculator_splits(sizes: Mapping[str, int], seed: int) -> dict[str, RowList]:
    """Return products of two numbers as prompts, and the split `sft` with calls. A prompt is `347*86`.

    All products have five digits. A policy that has learned to copy the frequent length of a result never samples a
    right copy of a rare length, and GRPO improves only sampled responses.

    Args:
        sizes: number of rows of `train`, `dev` and `test`.
        seed: seed of the choice.

    Returns:
        The rows of each split. No product comes twice in `train`, `dev` and `test`.

    Raises:
        ConfigError: a number is below 1, or there are fewer products than rows.
    """
    pairs = [(left, right) for left in range(100, 1000) for right in range(10, 100) if left * right >= 10_000]
    chosen = choose_splits(pairs, random.Random(seed), sizes)
    splits = {
        split: [_row([{"role": "user", "content": f"{left}*{right}"}], left * right, "") for left, right in factors]
        for split, factors in chosen.items()
    }
    return {**splits, "sft": call_rows(splits["train"])}


def call_rows(rows: RowList) -> RowList:
    """Return two rows for SFT for each product: the call of the calculator, and the answer after the result."""
    taught = []
    for row in rows:
        (question,), answer = row["prompt"], row["reward_model"]["ground_truth"]
        call = {"name": TOOL, "arguments": {ARGUMENT: question["content"]}}
        text = f"<tool_call>{json.dumps(call)}</tool_call>"
        result = [question, {"role": "assistant", "content": text}, {"role": "tool", "content": answer}]
        taught += [_row([question], answer, text), _row(result, answer, answer)]
    return taught


def _row(prompt: list[dict[str, str]], answer: int | str, response: str) -> dict[str, Any]:
    return prompt_row(prompt, str(answer), data_source="products", ability="math", response=response)
