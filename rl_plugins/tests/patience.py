"""Deadlines of tests: they end what hangs, and nothing else depends on them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

TIME_SCALE = float(os.environ.get("TEST_TIME_SCALE", "1"))
"""Factor of every deadline in the tests, for machines that are slow or busy."""


def patient(seconds: float) -> float:
    """Seconds that a test waits for something that always comes."""
    return seconds * TIME_SCALE


def wait_until(
    holds: Callable[[], object], awaited: str, seconds: float = 60.0, state: Callable[[], str] = lambda: ""
) -> None:
    """Ask again and again until a condition holds.

    Args:
        holds: Function whose result is true when the condition holds.
        awaited: What the caller waits for, for the message.
        seconds: Deadline, before `TEST_TIME_SCALE`.
        state: Function that says more about the state when the deadline has passed, such as the end of a log.

    Raises:
        AssertionError: If the condition does not hold before the deadline.
    """
    deadline = time.monotonic() + patient(seconds)
    while not holds():
        assert time.monotonic() < deadline, f"waited {patient(seconds):g} s for {awaited}\n{state()}"
        time.sleep(0.02)
