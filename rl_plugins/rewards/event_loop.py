"""Event loop of coroutine rewards: one for each thread, kept as long as the thread.

A reward may keep a client of a server between two batches, because connections stay valid in the same event loop. The
event loop runs during calls only. It runs in the calling thread, so a timer signal can interrupt a blocking
coroutine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from rl_plugins.rewards import deadline
from rl_plugins.rewards.deadline import SoftDeadline, run_with_deadline

Result = TypeVar("Result")

UNDECIDED = object()
"""Outcome of a call beside a call with a blocked event loop. The call must run again alone."""

_CURRENT = threading.local()


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
        calls: Functions without arguments; each returns an awaitable.
        deadline_s: Seconds for one call. None sets no deadline.

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

    loop_deadline_s = None if deadline_s is None else deadline_s + deadline.REPEAT_S
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
        await asyncio.wait(tasks, timeout=deadline.REPEAT_S)

    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        with suppress(SoftDeadline, SystemExit):
            run_with_deadline(lambda: run_in_event_loop(wait()), 2 * deadline.REPEAT_S)
