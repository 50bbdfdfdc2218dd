"""Calls of the code of the user: a deadline for each call, one event loop, errors in one line, ends of processes.

The soft deadline of a call is a timer signal, which raises an exception inside the called code. The signal interrupts
Python code, also a sleep. Signals reach the main thread only, so no other thread has a soft deadline. Under a debugger
there is no soft deadline either. The signal does not interrupt native code; for native code, `RewardPool` has the hard
deadline. A process has one such timer. A call of `signal.alarm` in a reward cancels the soft deadline of this call.

Coroutine rewards share an event loop: one for each thread, kept as long as the thread. A reward may keep a client of a
server between two batches, because connections stay valid in the same event loop. The event loop runs during calls
only. It runs in the calling thread, so a timer signal can interrupt a blocking coroutine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TypeVar

from rl_plugins.errors import ConfigError, UserError

Result = TypeVar("Result")

REPEAT_S = 0.5
"""Seconds between two alarms after the deadline."""

UNDECIDED = object()
"""Outcome of a call beside a call with a blocked event loop. The call must run again alone."""

_POLITE_ALARMS = 1
_BURST_S = 1e-5
_CURRENT = threading.local()
_MESSAGE_LIMIT = 250
_NO_LOOP = "no running event loop"


# Deadline -----------------------------------------------------------------------------------------------------------


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
        function: function to call.
        deadline_s: seconds until the first alarm. None sets no alarm.
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


# Event loop ---------------------------------------------------------------------------------------------------------


class CoroutineDeadline(SoftDeadline):
    """The event loop cancelled one coroutine at its deadline, and the other coroutines went on."""


def run_in_event_loop(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in the event loop of this thread."""
    runner: asyncio.Runner | None = getattr(_CURRENT, "runner", None)
    # An alarm inside the event loop's own code may leave the event loop in use.
    if runner is None or runner.get_loop().is_running():
        runner = _CURRENT.runner = asyncio.Runner()
    return runner.run(coroutine)


def run_concurrently(calls: Sequence[Callable[[], Awaitable[object]]], deadline_s: float | None) -> list[object]:
    """Await all calls together.

    Args:
        calls: functions without arguments; each returns an awaitable.
        deadline_s: seconds for one call. None sets no deadline.

    Returns:
        The result or the exception of each call. `UNDECIDED` for a call beside a blocking call. A `SoftDeadline` marks
        a call without a result in time.
    """
    loop_blocked, tasks = False, list[asyncio.Task[Any]]()

    def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # The event loop drops an exception of a plain callback after this function.
        nonlocal loop_blocked
        if isinstance(context.get("exception"), SoftDeadline):
            loop_blocked = True
        else:
            loop.default_exception_handler(context)

    async def run(call: Callable[[], Awaitable[object]]) -> object:
        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await call()
        except TimeoutError as error:
            return CoroutineDeadline() if limit.expired() else error

    async def run_all() -> list[object]:
        asyncio.get_running_loop().set_exception_handler(on_loop_error)
        tasks.extend(asyncio.ensure_future(run(call)) for call in calls)
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    loop_deadline_s = None if deadline_s is None else deadline_s + REPEAT_S
    try:
        outcomes = run_with_deadline(lambda: run_in_event_loop(run_all()), loop_deadline_s)
    except (SoftDeadline, SystemExit) as error:
        _end(tasks)
        return [error] if len(calls) == 1 else [UNDECIDED] * len(calls)
    loop_blocked = loop_blocked or any(type(outcome) is SoftDeadline for outcome in outcomes)
    if len(calls) == 1 or not loop_blocked:
        return outcomes
    return [UNDECIDED if isinstance(outcome, SoftDeadline) else outcome for outcome in outcomes]


def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks of an interrupted batch. A task without reaction stays in the event loop."""

    async def wait() -> None:
        await asyncio.wait(tasks, timeout=REPEAT_S)

    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        with suppress(SoftDeadline, SystemExit):
            run_with_deadline(lambda: run_in_event_loop(wait()), 2 * REPEAT_S)


# Errors and ends of processes ---------------------------------------------------------------------------------------


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception in one line, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return " ".join("".join(traceback.format_exception_only(error)).split())[:_MESSAGE_LIMIT] + place


def load_user_code(name: str, deed: str, function: Callable[[], Result], kind: str = "reward") -> Result:
    """Call a function with an import, or a constructor, of the user.

    Some clients must be made while an event loop runs. Code without its event loop is called again inside the event
    loop of this thread, in which the calls of a coroutine function run later.

    Args:
        name: name of the reward or tool, for the message.
        deed: description of the call, for the message.
        function: function to call.
        kind: first word of the message, before the name.

    Raises:
        ConfigError: the call raised an exception or asked for the end of the process.
    """

    async def call() -> Result:
        return function()

    try:
        with only_one_process(name, kind):
            try:
                return function()
            except RuntimeError as error:
                if _NO_LOOP not in str(error):
                    raise
            return run_in_event_loop(call())
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # any error of the user's code
        raise ConfigError(f"{kind} {name!r}: {deed} failed: {describe(error)}") from error


@contextmanager
def only_one_process(name: str, kind: str = "reward") -> Iterator[None]:
    """End each copy of this process, made by `os.fork` inside the block, at the end of the block.

    A copy would train, or answer for the reward worker, a second time.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            print(
                f"{kind} {name!r}: a copy of the process made by os.fork was ended: end the copy with os._exit",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


@contextmanager
def exits_refused() -> Iterator[None]:
    """Refuse `sys.exit(0)` and `os._exit(0)` of a reward or a data set, inside the block.

    Both would end a command without a word and with status 0. A copy of the process, made by `os.fork`, may call
    `os._exit`.

    Raises:
        UserError: the block ended with the status of success. Also the refused call of `os._exit` raises this error.
    """
    process, end_process = os.getpid(), os._exit

    def end_unless_finished(status: int) -> NoReturn:
        if status == 0 and os.getpid() == process:
            raise _early_end("os._exit")
        end_process(status)

    os._exit = end_unless_finished
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise
        raise _early_end("sys.exit") from end
    finally:
        os._exit = end_process


def _early_end(call: str) -> UserError:
    return UserError(
        f"code of the user (a reward, a data set) called {call}(0), and the command is not finished: remove the call"
    )
