"""Base class of all records of settings: a field has its range beside its type.

Example:
    @dataclass
    class AverageConfig(Settings):
        keep: Annotated[float, FROM_0_TO_BELOW_1] = 0.0

    AverageConfig(keep=2)  # ConfigError: keep=2: must be from 0 to below 1

OmegaConf checks the types of a recipe's options, and ignores `Annotated`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from rl_plugins.errors import ConfigError

_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    types.NoneType: "null",
}
_LARGEST_INT = 2**63 - 1
"""Largest integer in tensors, parquet files and MLflow."""


def fits(value: object, wanted: object) -> bool:
    """Return True if a value is of a type. A number must be finite, and a truth value is no number.

    Args:
        value: value to test.
        wanted: type hint of numbers, texts, truth values and null, or of a list of such values. Every value fits any
            other hint.
    """
    if get_origin(wanted) is Annotated:
        return fits(value, get_args(wanted)[0])
    if get_origin(wanted) in (Union, types.UnionType):
        return any(fits(value, choice) for choice in get_args(wanted))
    if get_origin(wanted) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(wanted))
    if get_origin(wanted) is list:
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return is_list and all(fits(item, get_args(wanted)[0]) for item in cast(Sequence[object], value))
    if wanted is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) <= _LARGEST_INT
    if wanted is float:
        size: Any = abs(value) if isinstance(value, Real) and not isinstance(value, bool) else None
        return size is not None and bool(size <= sys.float_info.max)
    return isinstance(value, cast(type, wanted)) if wanted in _WORDS else True


def words_of(wanted: object) -> str:
    """Return the words of a type hint, such as `a whole number or null`."""
    if get_origin(wanted) is Annotated:
        return words_of(get_args(wanted)[0])
    if get_origin(wanted) in (Union, types.UnionType):
        return " or ".join(words_of(choice) for choice in get_args(wanted))
    if get_origin(wanted) is Literal:
        return f"one of {', '.join(map(str, get_args(wanted)))}"
    if get_origin(wanted) is list:
        return f"a list, and each item {words_of(get_args(wanted)[0])}"
    return _WORDS.get(wanted, getattr(wanted, "__name__", str(wanted)))


def shown(value: object) -> str:
    """Return a value in a few characters, for an error message."""
    if isinstance(value, int) and abs(value) > _LARGEST_INT:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or more"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


@dataclass(frozen=True)
class Range:
    """Allowed values of a setting.

    A function inside an annotation does not see the names of its module, so such a range is a constant of the module.

    Attributes:
        demand: end of the error message, such as `must be at least 1`.
        holds: function of a value of the setting's type; returns True if the value is allowed.
    """

    demand: str
    holds: Callable[[Any], bool]

    def fault(self, value: object, wanted: object = float) -> str | None:
        """Return the end of an error message for a value that is not allowed, else None.

        Args:
            value: value to test.
            wanted: type hint of the setting.
        """
        if fits(value, wanted):
            return None if self.holds(value) else self.demand
        is_number = bool({int, float} & {wanted, *get_args(wanted)}) and str not in get_args(wanted)
        return f"must be {words_of(wanted)}; {self.demand}" if is_number else self.demand


def check_ranges(wanted: object, allowed: Range, /, **options: object) -> None:
    """Check values against one range.

    Args:
        wanted: type hint of the values, such as `int` or `float`.
        allowed: range of the values.
        options: values by name.

    Raises:
        ConfigError: a number is not finite, or a value is out of the range. The message begins with the name.
    """
    for name, value in options.items():
        if fault := allowed.fault(value, wanted):
            raise ConfigError(f"{name}={shown(value)}: {fault}")


AT_LEAST_1 = Range("must be at least 1", lambda value: value >= 1)
ABOVE_0 = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("must be 0 or more", lambda value: value >= 0)
ABOVE_0_TO_1 = Range("must be above 0 and at most 1", lambda value: 0 < value <= 1)
ABOVE_0_TO_BELOW_1 = Range("must be above 0 and below 1", lambda value: 0 < value < 1)
FROM_0_TO_BELOW_1 = Range("must be from 0 to below 1", lambda value: 0 <= value < 1)
FROM_0_TO_1 = Range("must be between 0 and 1", lambda value: 0 <= value <= 1)
FINITE = Range("must be a finite number", lambda value: True)
_LONGEST_S = 2_000_000
"""Largest number of seconds: a wait of the operating system takes milliseconds below 2**31."""
SECONDS = Range(f"must be above 0 and at most {_LONGEST_S} (23 days)", lambda value: 0 < value <= _LONGEST_S)
SECONDS_OR_0 = Range(f"must be from 0 to {_LONGEST_S} (23 days)", lambda value: 0 <= value <= _LONGEST_S)
SEED = Range(f"must be from 0 to {2**32 - 1}", lambda value: 0 <= value < 2**32)
PROCESSES = Range("must be from 0 to 4096", lambda value: 0 <= value <= 4096)

_MAX_NAME_BYTES = 200
FOLDER_NAME = Range(
    f"must be the name of a folder: up to {_MAX_NAME_BYTES} bytes of printable characters without /, with no dot at "
    "the start and no blank at the ends",
    lambda value: (
        value.isprintable()
        and 0 < len(value.encode()) <= _MAX_NAME_BYTES
        and "/" not in value
        and not value.startswith(".")
        and value == value.strip()
    ),
)


def or_null(limit: Range) -> Range:
    """Return a range with null in addition."""
    return Range(f"{limit.demand}, or null", lambda value: value is None or limit.holds(value))


def is_node(value: object) -> bool:
    """Return True if a value is a mapping with the key `_target_`, the path of a class or function."""
    return isinstance(value, Mapping) and isinstance(value.get("_target_"), str)


def is_node_or_file(value: object) -> bool:
    """Return True if a value is a node (`is_node`), or a mapping with `path` and `name`, of a file and a name in it."""
    return is_node(value) or (
        isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("path", "name"))
    )


ABOVE_0_OR_NULL = or_null(ABOVE_0)
NODE_OR_NULL = or_null(Range("must be a mapping with the key _target_, the path of a class or function", is_node))
NODE_OR_FILE_OR_NULL = or_null(
    Range(
        "must be a mapping with the key _target_, the path of a class or function, or with path and name, for a class "
        "or function of a file",
        is_node_or_file,
    )
)
GPUS = Range(
    "must be from 0 to 1, or a whole number of GPUs", lambda value: 0 <= value <= 1 or (value > 1 and value % 1 == 0)
)


def one_of(*words: str | int | None) -> Range:
    """Return the range with only these values."""
    listed = ", ".join("null" if word is None else str(word) for word in words)
    return Range(f"use one of {listed}", lambda value: value in words)


class Settings:
    """Record with a check of its fields when it is made.

    The message of an error begins with the name of the field. `parse_config` puts the name of the group before it.
    """

    def __post_init__(self) -> None:
        """Check the range of each field.

        Raises:
            ConfigError: a value is out of its range.
        """
        self.check_fields(**{name: getattr(self, name) for name in _ranges(cast(Hashable, type(self)))})

    @classmethod
    def check_fields(cls, **values: object) -> None:
        """Check values by the ranges of the fields with the same names, for a function with a few of the fields.

        Raises:
            ConfigError: a value is out of its range. The message begins with the name of the field.
        """
        ranges = _ranges(cast(Hashable, cls))
        for name, value in values.items():
            if not (isinstance(value, str) and value == MISSING):
                check_ranges(*ranges[name], **{name: value})


@cache
def _ranges(record: Hashable) -> Mapping[str, tuple[object, Range]]:
    """Return the type hint and the range of each field of a record that has a range, or is a number or a list."""
    ranges: dict[str, tuple[object, Range]] = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        given = next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Range)), None)
        plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        kinds = set(get_args(plain) or (plain,))
        if given is None and get_origin(plain) is list:
            ranges[name] = (plain, Range(f"must be {words_of(plain)}", lambda value: True))
        elif given or (kinds & {int, float} and kinds <= {int, float, types.NoneType}):
            ranges[name] = (plain, given or FINITE)
    return ranges
