"""Base class of all records of settings: a field has its range beside its type.

Example:
    @dataclass
    class AverageConfig(Settings):
        keep: Annotated[float, FROM_0_TO_BELOW_1] = 0.0

    AverageConfig(keep=2)  # ConfigError: keep=2: must be from 0 to below 1

OmegaConf checks the types of a recipe's options, and ignores `Annotated`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast, get_type_hints

from omegaconf import MISSING

from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Allowed values of a setting.

    A function inside an annotation does not see the names of its module, so such a range is a constant of the module.

    Attributes:
        demand: end of the error message, such as `must be at least 1`.
        holds: function of a value; returns True if the value is allowed. NaN must be in no range.
    """

    demand: str
    holds: Callable[[Any], bool]


AT_LEAST_1 = Range("must be at least 1", lambda value: value >= 1)
ABOVE_0 = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = Range("must be 0 or more", lambda value: value >= 0)
ABOVE_0_TO_1 = Range("must be above 0 and at most 1", lambda value: 0 < value <= 1)
FROM_0_TO_BELOW_1 = Range("must be from 0 to below 1", lambda value: 0 <= value < 1)
FROM_0_TO_1 = Range("must be between 0 and 1", lambda value: 0 <= value <= 1)


def or_null(limit: Range) -> Range:
    """Return a range with null in addition."""
    return Range(f"{limit.demand}, or null", lambda value: value is None or limit.holds(value))


ABOVE_0_OR_NULL = or_null(ABOVE_0)
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
            ConfigError: A value is out of its range.
        """
        for name, allowed in _ranges(cast(Hashable, type(self))).items():
            value = getattr(self, name)
            if value != MISSING and not allowed.holds(value):
                raise ConfigError(f"{name}={value}: {allowed.demand}")


@cache
def _ranges(record: Hashable) -> Mapping[str, Range]:
    hints = get_type_hints(record, include_extras=True)
    return {name: range_ for name, hint in hints.items() for range_ in getattr(hint, "__metadata__", ()) if range_}
