"""Projects of users without and with RL, in examples/: the added lines, and the columns of a CSV log."""

from __future__ import annotations

import csv
import difflib
from pathlib import Path


def added_lines(before: Path, after: Path) -> list[str]:
    """Return the lines of `after` missing in `before`, which need not exist; a changed line counts as added."""
    old, new = (file.read_text().splitlines() if file.exists() else [] for file in (before, after))
    compared = difflib.unified_diff(old, new, n=0)
    return [line for line in compared if line.startswith("+") and not line.startswith("+++")]


def logged(metrics: Path) -> dict[str, list[float]]:
    """Return the columns of a `metrics.csv` of Lightning's CSV logger, in the order of the rows."""
    columns: dict[str, list[float]] = {}
    with metrics.open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    columns.setdefault(name, []).append(float(value))
    return columns
