"""What a row holds under a dotted key, such as `extra_info.answer`, checked; messages name the row and the option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from rl_plugins.data.parquet import Row
from rl_plugins.errors import ConfigError


def find(row: Row, key: str, option: str, where: str) -> Any:
    """Return what is under a dotted key.

    Raises:
        ConfigError: the key leads nowhere; names the row (`where`), the option and what there is.
    """
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(map(str, value)) if isinstance(value, Mapping) else "no further keys"
            raise ConfigError(f"{where}: {option}={key!r} leads nowhere at {part!r}; there is {there}.")
        value = value[part]
    return value


def find_text(row: Row, key: str, option: str, where: str) -> str:
    """Return the text under a dotted key.

    Raises:
        ConfigError: the key leads nowhere, or to something that is not a text.
    """
    value = find(row, key, option, where)
    if not isinstance(value, str) or not value.strip():
        refuse(where, option, key, value, "a text")
    return value


def refuse(where: str, option: str, key: str, value: Any, expected: str) -> NoReturn:
    """Raise a ConfigError: the value under the key is not what was expected."""
    raise ConfigError(f"{where}: {option}={key!r} holds {value!r}, not {expected}.")
