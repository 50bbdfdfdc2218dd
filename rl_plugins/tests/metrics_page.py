"""The names on docs/metrics.md, the page of all metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \|", re.MULTILINE)
_PART = re.compile(r"<\w+>")
_CHOICES = re.compile(r"`\w+`(, `\w+`)*")


@cache
def names() -> list[str]:
    """Return the names in the order of the page, with parts in angle brackets."""
    cells = [cell for cell, _ in _rows() if not _PART.fullmatch(cell.strip("`"))]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def documented(name: str) -> bool:
    """Return True if the page has the name of a metric."""
    return _any_name().fullmatch(name) is not None


def undocumented(logged: Iterable[str]) -> list[str]:
    """Return the names which the page lacks."""
    return [name for name in logged if not documented(name)]


@cache
def _rows() -> list[tuple[str, str]]:
    """Return the first two cells of each row whose first cell is code."""
    return _ROW.findall(PAGE.read_text(encoding="utf-8"))


@cache
def _any_name() -> re.Pattern[str]:
    phases = [name.removeprefix("time/") for name in names() if name.startswith("time/")]
    choices = {"<phase>": "|".join(phases)}
    for cell, meaning in _rows():
        if _CHOICES.fullmatch(meaning):
            choices[cell.strip("`")] = "|".join(re.findall(r"\w+", meaning))
    # Data can have any text as the name of a source or a component.
    patterns = [_PART.sub(lambda part: f"(?:{choices.get(part[0], '.+')})", name) for name in names()]
    return re.compile("|".join(patterns))
