"""Durations as text: 90s, 45m, 3h50m, 1d12h."""

from __future__ import annotations

import re

from rl_plugins.errors import ConfigError

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_UNIT_SECONDS = (86_400, 3_600, 60, 1)


def seconds_of(option: str, text: str) -> float:
    """Return the seconds of a duration.

    Args:
        option: Name of the option, for the message of an error.
        text: Days, hours, minutes and seconds in this order, each a number with a letter. Parts may be left out.

    Raises:
        ConfigError: The text is not a duration, or the duration is 0.
    """
    match = _DURATION.fullmatch(text.strip())
    numbers = match.groups(default="0") if match else ()
    seconds = sum(int(number) * unit for number, unit in zip(numbers, _UNIT_SECONDS, strict=False))
    if not seconds:
        raise ConfigError(f"{option}={text}: write a duration such as 45m, 3h50m or 1d12h")
    return float(seconds)
