"""Final numbers of responses and solutions, as in GSM8K."""

from __future__ import annotations

import re
from decimal import Decimal

MARKER = "####"
"""Text before the final number."""
_MINUS_SIGN = "−"
# A sign may stand before the sign of a currency.
_SIGN, _FRACTION = r"(?:(?<![\w.)])[-+])?(?:\\?\$)?", r"(?:\.\d+)?|\.\d+"
_NOT_READ = str.maketrans("", "", "\\$,")
# Groups of thousands, as in 1,234,567, or of lakhs, as in 12,34,567. Other commas divide the numbers of a list.
_GROUPS = r"\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2}){1,9},\d{3}(?!\d)"
_IN_TEXT = re.compile(rf"{_SIGN}(?:(?:{_GROUPS}|\d+){_FRACTION})")
_AFTER_MARKER = re.compile(rf"{_SIGN}(?:\d+(?:,\d+)*{_FRACTION})")


def with_hyphens(text: str) -> str:
    """Return a text with hyphens in place of minus signs (U+2212)."""
    return text.replace(_MINUS_SIGN, "-")


def final_number(text: str) -> str | None:
    """Return the final number of a text; None without a number.

    The final number is the first number after the last "####", where any comma between two digits is a separator, as in
    verl. In a text without the marker, the final number is the last number. Equal numbers have equal texts: without
    separators, a plus sign, and zeros at the beginning and after the last digit of a fraction.
    """
    _, marker, tail = with_hyphens(text).rpartition(MARKER)
    numbers: list[str] = (_AFTER_MARKER if marker else _IN_TEXT).findall(tail)
    if not numbers:
        return None
    number = f"{Decimal(numbers[0 if marker else -1].translate(_NOT_READ)):f}"
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number == "-0" else number
