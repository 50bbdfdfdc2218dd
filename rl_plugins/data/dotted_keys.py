"""Values under dotted keys of a row, such as `extra_info.answer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_plugins.errors import RowError


def find(row: Mapping[str, Any], key: str, option: str, location: str) -> Any:
    """Return the value under a dotted key.

    Args:
        row: the row.
        key: the dotted key.
        option: name of the option that gives the key, for the message.
        location: file and number of the row, for the message.

    Raises:
        RowError: the row has no such key.
    """
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            present = ", ".join(map(str, value)) if isinstance(value, Mapping) else "no further keys"
            raise RowError(location, f"{option}={key!r}", f"leads nowhere at {part!r}; there is {present}")
        value = value[part]
    return value
