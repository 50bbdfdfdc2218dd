"""Results of cases: lines of JSON in a file, and rows of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"
_MESSAGE_WIDTH = 160


@dataclass(frozen=True)
class Result:
    """Result of a case.

    Attributes:
        section: name of the section.
        case: name of the case.
        status: `PASSED`, `FAILED` or `SKIPPED`.
        seconds: duration.
        figures: measured numbers and versions, by name.
        message: error of a failed case with its traceback, or reason of a skipped case.
    """

    section: str
    case: str
    status: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""

    def row(self) -> str:
        """Return the row of the table. A failed case has the last line of its message."""
        words = ", ".join(f"{name} {_short(value)}" for name, value in self.figures.items())
        if self.message:
            words = self.message.strip().splitlines()[-1][:_MESSAGE_WIDTH]
        return f"{self.section:18}{self.case:34}{self.status:9}{self.seconds:7.1f} s  {words}".rstrip()


def append(file: Path, result: Result) -> None:
    """Append a result to a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(result), default=str) + "\n")


def read(file: Path) -> list[Result]:
    """Return the results in a file."""
    if not file.is_file():
        return []
    return [Result(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
