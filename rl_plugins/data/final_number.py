"""Final numbers of responses and solutions, as in GSM8K."""

from __future__ import annotations

import re

MARKER = "####"
"""Text before the final number."""
_MINUS_SIGN = "−"
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")


def with_hyphens(text: str) -> str:
    """Return a text with hyphens in place of minus signs (U+2212)."""
    return text.replace(_MINUS_SIGN, "-")


def final_number(text: str) -> str | None:
    """Return the final number of a text without thousands separators; None without a number.

    The final number is the first number after the last "####". In a text without the marker, the final number is the
    last number.
    """
    _, marker, tail = with_hyphens(text).rpartition(MARKER)
    numbers: list[str] = _NUMBER.findall(tail)
    if not numbers:
        return None
    return numbers[0 if marker else -1].replace(",", "")
