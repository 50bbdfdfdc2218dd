"""What the policy said to the same prompts at the first and at the last validation."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """Samples to one prompt; a sample is a row of a table of `SampleTable`.

    Attributes:
        prompt: the prompt.
        ground_truth: as the data has it.
        first: at the first validation; None where it has no sample of this prompt.
        last: at the last one.
    """

    prompt: str
    ground_truth: object
    first: dict[str, Any] | None
    last: dict[str, Any] | None


def compare(first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> list[Comparison]:
    """Put samples of two validations side by side, the n-th to a prompt beside the n-th to the same prompt."""
    waiting: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in last:
        waiting[str(row["prompt"])].append(row)
    pairs = []
    for row in first:
        others = waiting[str(row["prompt"])]
        pairs.append(Comparison(str(row["prompt"]), row["ground_truth"], row, others.pop(0) if others else None))
    left = [row for rows in waiting.values() for row in rows]
    return pairs + [Comparison(str(row["prompt"]), row["ground_truth"], None, row) for row in left]


def read_samples(file: Path) -> list[dict[str, Any]] | None:
    """The rows of a table; None if it was not written to its end."""
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    return rows


def validation_step(file: Path) -> int:
    """The step of a table, from its name."""
    return int(file.stem.removeprefix("step_"))
