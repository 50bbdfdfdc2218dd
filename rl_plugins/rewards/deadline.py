"""The soft deadline: a timer signal that interrupts Python code, also code that sleeps.

Signals reach the main thread only; in any other thread, and under a debugger, no timer is set. Native code
that does not return to the interpreter is out of its reach: the pool's hard deadline is there for that. A
scorer that sets `signal.alarm` itself cancels the soft deadline of its own call, since a process has one such
timer.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Result = TypeVar("Result")


class SoftDeadline(BaseException):
    """Raised inside a scorer whose time is up; a scorer's `except Exception` lets it through."""


def debugging() -> bool:
    """Whether a debugger traces this thread (a coverage tracer does not count)."""
    tracer = sys.gettrace()
    module = getattr(tracer, "__module__", None) or type(tracer).__module__
    return tracer is not None and not module.startswith("coverage")


def run_with_deadline(function: Callable[[], Result], deadline_s: float | None) -> Result:
    """Call `function`; raise `SoftDeadline` inside it after `deadline_s` seconds (None: never)."""
    if deadline_s is None or debugging() or threading.current_thread() is not threading.main_thread():
        return function()
    armed = True

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        if armed and not debugging():
            raise SoftDeadline

    started = time.monotonic()
    previous_handler = signal.signal(signal.SIGALRM, on_alarm)
    previous_delay, previous_interval = signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        try:
            return function()
        finally:
            armed = False
    finally:  # its own block, so that an alarm at the very last moment cannot skip it
        signal.signal(signal.SIGALRM, previous_handler)
        left_s = previous_delay and max(previous_delay - (time.monotonic() - started), 1e-3)
        signal.setitimer(signal.ITIMER_REAL, left_s, previous_interval)
