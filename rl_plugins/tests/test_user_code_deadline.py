"""run_with_deadline raises at the deadline, also in code that catches the exception, and restores the timer."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from rl_plugins import user_code
from rl_plugins.tests.patience import patient
from rl_plugins.user_code import SoftDeadline, debugging, run_with_deadline

# Deadline for calls with a result, and for calls with an alarm of their own.
DEADLINE_S = patient(60)


def trace(frame: FrameType, event: str, argument: Any) -> None:
    return None


@pytest.fixture
def _tracer() -> Iterator[None]:
    previous = sys.gettrace()
    yield
    sys.settrace(previous)


def alarm_handler() -> Any:
    return signal.getsignal(signal.SIGALRM)


def test_run_with_deadline_returns_the_result_and_turns_the_timer_off() -> None:
    handler, outer = alarm_handler(), signal.getitimer(signal.ITIMER_REAL)[0]

    def function() -> int:
        assert alarm_handler() is not handler
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= DEADLINE_S
        return 3

    assert run_with_deadline(function, DEADLINE_S) == 3
    assert alarm_handler() is handler
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == bool(outer)


def compute_for_ever() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    "never_returns",
    [lambda: time.sleep(600), lambda: threading.Event().wait(), compute_for_ever],
    ids=["sleep", "wait", "compute"],
)
def test_run_with_deadline_raises_after_the_deadline(never_returns: Any) -> None:
    with pytest.raises(SoftDeadline):
        run_with_deadline(never_returns, 0.02)


def test_run_with_deadline_restores_the_handler_after_an_alarm_before_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, setitimer, outer = alarm_handler(), signal.setitimer, signal.getitimer(signal.ITIMER_REAL)[0]

    def setitimer_with_alarm(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        previous = setitimer(which, seconds, interval)
        if seconds == DEADLINE_S:
            signal.raise_signal(signal.SIGALRM)
        return previous

    calls: list[int] = []
    monkeypatch.setattr(signal, "setitimer", setitimer_with_alarm)
    with pytest.raises(SoftDeadline):
        run_with_deadline(lambda: calls.append(1), DEADLINE_S)
    assert calls == []
    assert alarm_handler() is handler
    assert bool(signal.getitimer(signal.ITIMER_REAL)[0]) == bool(outer)


def test_run_with_deadline_stops_the_timer_before_the_handler_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, set_handler = alarm_handler(), signal.signal
    seconds_left: list[float] = []

    def set_handler_and_look(signum: int, new_handler: Any) -> Any:
        if new_handler is handler:
            seconds_left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        return set_handler(signum, new_handler)

    monkeypatch.setattr(signal, "signal", set_handler_and_look)
    run_with_deadline(lambda: None, DEADLINE_S)
    assert seconds_left == [0.0]


def test_run_with_deadline_takes_the_seconds_of_the_function_from_an_outer_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter([100.0, 2100.0])
    monkeypatch.setattr(user_code, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    before = signal.setitimer(signal.ITIMER_REAL, 5000.0)
    try:
        run_with_deadline(lambda: None, DEADLINE_S)
        left = signal.getitimer(signal.ITIMER_REAL)[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
    # 5000 s less the 2000 s of the function, and the time of the test.
    assert 2500.0 < left <= 3000.0


def test_run_with_deadline_sets_no_timer_in_another_thread_or_without_deadline() -> None:
    handler, handlers = alarm_handler(), []
    thread = threading.Thread(target=lambda: handlers.append(run_with_deadline(alarm_handler, DEADLINE_S)))
    thread.start()
    thread.join()
    handlers.append(run_with_deadline(alarm_handler, None))
    assert handlers == [handler, handler]


@pytest.mark.usefixtures("_tracer")
def test_run_with_deadline_does_not_interrupt_a_debugger() -> None:
    def step_into_debugger() -> str:
        sys.settrace(trace)  # as breakpoint() does
        signal.raise_signal(signal.SIGALRM)
        return "stepped"

    handler = alarm_handler()
    assert run_with_deadline(step_into_debugger, DEADLINE_S) == "stepped"
    assert debugging()
    assert run_with_deadline(alarm_handler, DEADLINE_S) is handler


@pytest.mark.usefixtures("_tracer")
def test_debugging_is_false_under_a_coverage_tracer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "__module__", "coverage.pytracer")
    sys.settrace(trace)
    assert not debugging()


def swallow_in_a_loop() -> None:
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def swallow_and_continue() -> None:
    swallowed = 0
    while True:
        try:
            compute_for_ever()
        except BaseException:
            swallowed += 1
            continue


def swallow_twice_in_nested_loops() -> None:
    while True:
        try:
            swallow_in_a_loop()
        except:  # noqa: E722 (as in a careless reward)
            time.sleep(0)


@pytest.mark.parametrize("function", [swallow_in_a_loop, swallow_and_continue, swallow_twice_in_nested_loops])
def test_run_with_deadline_ends_a_loop_that_swallows_every_exception(
    function: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "REPEAT_S", 0.05)
    handler = alarm_handler()
    with pytest.raises(SoftDeadline):
        run_with_deadline(function, 0.02)
    assert alarm_handler() is handler
