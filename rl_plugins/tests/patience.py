"""Deadlines of tests: a deadline ends a hanging test, and has no other effect."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

TIME_SCALE = float(os.environ.get("TEST_TIME_SCALE", "1"))
"""Factor of every deadline in the tests, for slow or busy machines."""


def patient(seconds: float) -> float:
    """Return the seconds of a wait for a certain event."""
    return seconds * TIME_SCALE


def is_running(process: int) -> bool:
    """Return True if a process has not ended. The parent may not have collected an ended process yet."""
    try:
        return bool(psutil.Process(process).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kept_by(keeper: int) -> psutil.Process:
    """Return the process under a keeper."""
    (kept,) = psutil.Process(keeper).children()
    return kept


def wait_until(
    holds: Callable[[], object], awaited: str, seconds: float = 60.0, state: Callable[[], str] = lambda: ""
) -> None:
    """Ask again and again until a condition holds.

    Args:
        holds: function with a true result when the condition holds.
        awaited: name of the awaited event, for the message.
        seconds: deadline, before `TEST_TIME_SCALE`.
        state: function for more details after the deadline, such as the end of a log.

    Raises:
        AssertionError: if the condition does not hold before the deadline.
    """
    deadline = time.monotonic() + patient(seconds)
    while not holds():
        assert time.monotonic() < deadline, f"waited {patient(seconds):g} s for {awaited}\n{state()}"
        time.sleep(0.02)
