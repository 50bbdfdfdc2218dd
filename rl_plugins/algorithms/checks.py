"""Range checks of numeric options; each error names the option and its value. Numbers must be finite."""

from __future__ import annotations

from rl_plugins.config.settings import ABOVE_0, ABOVE_0_TO_1, FROM_0_TO_1, NOT_NEGATIVE, check_ranges


def check_not_negative(**options: float) -> None:
    """Raise a ConfigError for an option below 0."""
    check_ranges(float, NOT_NEGATIVE, **options)


def check_positive(**options: float) -> None:
    """Raise a ConfigError for an option that is not above 0."""
    check_ranges(float, ABOVE_0, **options)


def check_fractions(**options: float) -> None:
    """Raise a ConfigError for an option outside [0, 1]."""
    check_ranges(float, FROM_0_TO_1, **options)


def check_share(share: float) -> None:
    """Raise a ConfigError for a share of the valid tokens outside (0, 1]."""
    check_ranges(float, ABOVE_0_TO_1, share=share)
