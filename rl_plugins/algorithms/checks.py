"""Range checks of numeric options; each error names the option and its value."""

from __future__ import annotations


def check_not_negative(**options: float) -> None:
    """Raise a ValueError for an option below 0."""
    for name, value in options.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}: must be 0 or more")


def check_positive(**options: float) -> None:
    """Raise a ValueError for an option that is not above 0."""
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")


def check_fractions(**options: float) -> None:
    """Raise a ValueError for an option outside [0, 1]."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: use a number from 0 to 1")


def check_share(share: float) -> None:
    """Raise a ValueError for a share of the valid tokens outside (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: must be above 0 and at most 1, the share of valid tokens")
