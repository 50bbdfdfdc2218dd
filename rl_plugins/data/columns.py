"""What a row holds under a dotted key, such as `extra_info.answer`, checked; messages name the row and the option."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rl_plugins.data.parquet import Row
from rl_plugins.errors import RowError


def find(row: Row, key: str, option: str, where: str) -> Any:
    """Return what is under a dotted key.

    Raises:
        RowError: the key leads nowhere; names the row (`where`), the option and what there is.
    """
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(map(str, value)) if isinstance(value, Mapping) else "no further keys"
            raise RowError(where, f"{option}={key!r}", f"leads nowhere at {part!r}; there is {there}.")
        value = value[part]
    return value


def find_text(row: Row, key: str, option: str, where: str) -> str:
    """Return the text under a dotted key.

    Raises:
        RowError: the key leads nowhere, or to something that is not a text.
    """
    value = find(row, key, option, where)
    if not isinstance(value, str) or not value.strip():
        refuse(where, option, key, value, "a text")
    return value


def find_number(row: Row, key: str, option: str, where: str) -> float:
    """Return the finite number under a dotted key.

    Raises:
        RowError: the key leads nowhere, or to something else.
    """
    value = find(row, key, option, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        refuse(where, option, key, value, "a finite number")
    return float(value)


def find_label(row: Row, key: str, option: str, where: str) -> bool:
    """Return the true or false under a dotted key.

    Raises:
        RowError: the key leads nowhere, or to something else.
    """
    value = find(row, key, option, where)
    if not isinstance(value, bool):
        refuse(where, option, key, value, "true (desirable) or false")
    return value


def find_list(row: Row, key: str, option: str, where: str) -> list[Any]:
    """Return the list under a dotted key, which is not empty.

    Raises:
        RowError: the key leads nowhere, or to something else.
    """
    value = find(row, key, option, where)
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        refuse(where, option, key, value, "a list with an entry for every step")
    return list(value)


def refuse(where: str, option: str, key: str, value: Any, expected: str) -> NoReturn:
    """Raise a RowError: the value under the key is not what was expected."""
    raise RowError(where, f"{option}={key!r}", f"holds {value!r}, not {expected}.")
