"""JSON from outside: of a policy, a program, a server or a file of the user. Such JSON may have any form."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

MAX_DEPTH = 100
"""Largest number of lists and objects around a value."""
_CONTAINERS = (dict, list)


def read_foreign_json(text: str | bytes, *, unique_keys: bool = False) -> Any:
    """Return the value of a JSON text. Each function that walks through the value, such as `json.dumps`, can take it.

    Args:
        text: the text.
        unique_keys: refuse an object with two values under one key. By default the last value counts.

    Raises:
        ValueError: the text is no JSON, or has more than `MAX_DEPTH` lists and objects around a value.
    """
    fault = f"the JSON has more than {MAX_DEPTH} lists and objects around a value"
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError(fault) from None
    if _is_deep(value):
        raise ValueError(fault)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"an object has several values under the key {twice[:40]!r}")
    return value


def _is_deep(value: Any) -> bool:
    """Return True if more than `MAX_DEPTH` lists and objects are around a value."""
    level = [value] if type(value) in _CONTAINERS else []
    for _ in range(MAX_DEPTH):
        # One pass for each level: a long history of messages has few levels.
        level = [
            item
            for outer in level
            for item in (outer.values() if type(outer) is dict else outer)
            if type(item) in _CONTAINERS
        ]
        if not level:
            return False
    return True
