"""JSON from outside: of a policy, a program, a server or a file of the user. Such JSON may have any form."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 100
"""Largest number of lists and objects around a value."""


def read_foreign_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Each function that walks through the value, such as `json.dumps`, can take it.

    Raises:
        ValueError: The text is no JSON, or has more than `MAX_DEPTH` lists and objects around a value.
    """
    fault = f"the JSON has more than {MAX_DEPTH} lists and objects around a value"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(fault) from None
    if _is_deep(value, MAX_DEPTH):
        raise ValueError(fault)
    return value


def _is_deep(value: object, left: int) -> bool:
    """Return True if more than `left` lists and objects are around a value."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return left == 0 or any(_is_deep(item, left - 1) for item in items)
