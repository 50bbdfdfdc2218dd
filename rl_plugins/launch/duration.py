"""Times as people write them: 90s, 45m, 3h50m, 1d12h."""

from __future__ import annotations

import re

from rl_plugins.errors import ConfigError

_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_SECONDS = (86_400, 3_600, 60, 1)


def seconds_of(option: str, text: str) -> float:
    """The seconds of a duration.

    Args:
        option: where it stands.
        text: days, hours, minutes and seconds, each with its letter; those that are 0 may be left out.

    Raises:
        ConfigError: it is not a duration, or none at all.
    """
    match = _PARTS.fullmatch(text.strip())
    parts = match.groups(default="0") if match else ()
    seconds = sum(int(part) * unit for part, unit in zip(parts, _SECONDS, strict=False))
    if not seconds:
        raise ConfigError(f"{option}={text}: write it like 45m, 3h50m or 1d12h")
    return float(seconds)
