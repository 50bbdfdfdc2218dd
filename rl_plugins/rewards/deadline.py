"""Soft deadline of a call: a timer signal, which raises an exception inside the called code.

The signal interrupts Python code, also a sleep. Signals reach the main thread only, so no other thread has a
soft deadline. Under a debugger there is no soft deadline either. The signal does not interrupt native code; for native
code, `RewardPool` has the hard deadline. A process has one such timer. A call of `signal.alarm` in a reward cancels the
soft deadline of this call.
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

REPEAT_S = 0.5
"""Seconds between two alarms after the deadline."""

_POLITE_ALARMS = 1
_BURST_S = 1e-5


class SoftDeadline(BaseException):
    """Raised inside a reward after its deadline. `except Exception` in the reward does not catch this class."""


def debugging() -> bool:
    """Return True if a debugger traces this thread. A coverage tracer does not count."""
    tracer = sys.gettrace()
    module = getattr(tracer, "__module__", None) or type(tracer).__module__
    return tracer is not None and not module.startswith("coverage")


def run_with_deadline(function: Callable[[], Result], deadline_s: float | None) -> Result:
    """Call `function`, and raise `SoftDeadline` inside the call after the deadline.

    An event loop, or a bare `except`, may swallow an alarm, so the alarm is repeated. From the second alarm on, alarms
    come in bursts with gaps of microseconds. One of these hits the code between two `try` blocks, also in a loop
    with a bare `except`.

    Args:
        function: Function to call.
        deadline_s: Seconds until the first alarm. None sets no alarm.
    """
    if deadline_s is None or debugging() or threading.current_thread() is not threading.main_thread():
        return function()
    armed, alarms = True, 0

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        nonlocal alarms
        if not armed or debugging():
            return
        alarms += 1
        if alarms > _POLITE_ALARMS:
            # Different gaps, so no loop of constant duration stays in step with the alarms.
            signal.setitimer(signal.ITIMER_REAL, _BURST_S * (1 + alarms % 16), REPEAT_S)
        raise SoftDeadline

    started = time.monotonic()
    previous_handler = signal.getsignal(signal.SIGALRM)
    previous_delay, previous_interval = signal.getitimer(signal.ITIMER_REAL)
    # An alarm may arrive between any two statements. Every statement after the first change is inside both blocks.
    try:
        try:
            signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, deadline_s, REPEAT_S)
            return function()
        finally:
            armed = False
    finally:
        # The timer stops first: an alarm under the default handler would end the process.
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous_handler)
        if previous_delay:
            left_s = max(previous_delay - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, left_s, previous_interval)
