"""The timer interrupts, leaves other timers alone, and stays out of a debugger's way."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

from rl_plugins.rewards.deadline import SoftDeadline, debugging, run_with_deadline


def test_the_result_is_returned_and_the_timer_is_off() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    outer = signal.getitimer(signal.ITIMER_REAL)[0]
    assert run_with_deadline(lambda: 3, 0.05) == 3
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) is handler
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == bool(outer)


def test_sleep_is_interrupted() -> None:
    started = time.monotonic()
    with pytest.raises(SoftDeadline):
        run_with_deadline(lambda: time.sleep(10), 0.1)
    assert time.monotonic() - started < 5


def test_an_outer_timer_keeps_its_time() -> None:
    before = signal.setitimer(signal.ITIMER_REAL, 50.0)
    started = time.monotonic()
    try:
        run_with_deadline(lambda: time.sleep(0.2), 1.0)
        left = signal.getitimer(signal.ITIMER_REAL)[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
    assert 45.0 < left <= 50.0 - 0.2 + 0.01
    assert time.monotonic() - started < 5


def test_no_timer_in_another_thread_or_without_deadline() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run_with_deadline(lambda: 1, 0.01)))
    thread.start()
    thread.join()
    assert results == [1]
    assert run_with_deadline(lambda: time.sleep(0.01), None) is None


def test_a_debugger_stops_the_clock() -> None:
    def trace(frame: FrameType, event: str, argument: Any) -> None:
        return None

    def step_into_debugger() -> str:
        sys.settrace(trace)  # what breakpoint() does
        time.sleep(0.2)
        return "stepped"

    previous = sys.gettrace()
    try:
        assert run_with_deadline(step_into_debugger, 0.1) == "stepped"
        assert debugging()
        assert run_with_deadline(lambda: time.sleep(0.1), 0.01) is None
    finally:
        sys.settrace(previous)


def test_a_coverage_tracer_is_no_debugger() -> None:
    def trace(frame: FrameType, event: str, argument: Any) -> None:
        return None

    trace.__module__ = "coverage.pytracer"
    previous = sys.gettrace()
    try:
        sys.settrace(trace)
        assert not debugging()
    finally:
        sys.settrace(previous)
