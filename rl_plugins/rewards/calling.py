"""Calls of one reward function: arguments by name, under a deadline.

A function asks for any of `data_source`, `solution_str`, `ground_truth`, `extra_info`, `prompt`, `messages`,
`turns_left` (one sample), or for the plurals `data_sources`, `solution_strs`, ... (a batch; the function returns a list
of the same length). The calls of a coroutine function run concurrently. A function returns a number, or a mapping with
"score" and further numbers. As an environment with turns left, a function may also return a reply to the policy: text,
or a message with "role" and "content".

The soft deadline is a timer signal. The signal interrupts Python code, also code that sleeps. Signals reach the main
thread only, so no other thread has a soft deadline. Under a debugger there is no soft deadline either. The signal does
not interrupt native code; for native code, `RewardPool` has the hard deadline. A process has one such timer. A call of
`signal.alarm` in a reward cancels the soft deadline of this call.

An exception of a call is recorded, never turned into a number. If a batched call fails, every sample of the call is
marked as failed, because the sample at fault is unknown.
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.loading import load_reward, nearest
from rl_plugins.rewards.records import Score, ScoringRequest, failed, read_scores

Result = TypeVar("Result")

_FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")
SAMPLE_FIELDS = {field: field for field in (*_FIELDS, "messages", "turns_left")}
BATCH_FIELDS = {f"{field}s": field for field in _FIELDS} | {"conversations": "messages", "turns_lefts": "turns_left"}
LOOP_GRACE_S = 0.5
_UNDECIDED = object()


class SoftDeadline(BaseException):
    """Raised inside a reward after its deadline. `except Exception` in the reward does not catch this class."""


class _CoroutineDeadline(SoftDeadline):
    """The event loop cancelled one coroutine at its deadline, and the other coroutines went on."""


def debugging() -> bool:
    """Return True if a debugger traces this thread. A coverage tracer does not count."""
    tracer = sys.gettrace()
    module = getattr(tracer, "__module__", None) or type(tracer).__module__
    return tracer is not None and not module.startswith("coverage")


def run_with_deadline(function: Callable[[], Result], deadline_s: float | None, repeat_s: float = 0.0) -> Result:
    """Call `function`, and raise `SoftDeadline` inside the call after the deadline.

    Args:
        function: Function to call.
        deadline_s: Seconds until the alarm. None sets no alarm.
        repeat_s: Seconds between further alarms, 0 for one alarm only. An event loop may swallow an alarm and then
            needs further alarms.
    """
    if deadline_s is None or debugging() or threading.current_thread() is not threading.main_thread():
        return function()
    armed = True

    def on_alarm(signum: int, frame: FrameType | None) -> None:
        if armed and not debugging():
            raise SoftDeadline

    started = time.monotonic()
    previous_handler = signal.getsignal(signal.SIGALRM)
    previous_delay, previous_interval = signal.getitimer(signal.ITIMER_REAL)
    # An alarm may arrive between any two statements. Every statement after the first change is inside both blocks.
    try:
        try:
            signal.signal(signal.SIGALRM, on_alarm)
            signal.setitimer(signal.ITIMER_REAL, deadline_s, repeat_s)
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


class CompositeReward(ABC):
    """Reward with its own calls and its own deadline handling, such as a sum of other rewards.

    Attributes:
        batched: True if one call should have many requests.
        is_async: True if one call waits for many requests concurrently.
    """

    batched: bool
    is_async: bool

    @abstractmethod
    def __call__(self, requests: Sequence[ScoringRequest], deadline_s: float | None) -> list[Score | None]:
        """Score requests in order. None marks a request to run again alone. A single request never has None."""


class RewardFunction:
    """Loaded reward function, from requests to scores."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the function and find the arguments it asks for.

        Args:
            config: Configuration of one reward (see `loading`).

        Raises:
            ConfigError: The function cannot be loaded, asks for an argument outside the fields of a sample and the
                configuration, mixes singular and plural names, or does not take a configured argument.
        """
        self.name, self.function, self.fixed = load_reward(config)
        if isinstance(self.function, CompositeReward):
            self.is_async, self.batched = self.function.is_async, self.function.batched
            return
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 (an instance's method)
        )
        self.fields, self.batched = self._requested_fields()

    def _requested_fields(self) -> tuple[dict[str, str], bool]:
        parameters = inspect.signature(self.function).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        names = [parameter.name for parameter in named]
        for key in self.fixed:
            if key in SAMPLE_FIELDS or key in BATCH_FIELDS:
                raise ConfigError(f"reward {self.name!r}: {key!r} comes from the sample and cannot be configured")
            if key not in names and not takes_any:
                raise ConfigError(f"reward {self.name!r} takes no argument {key!r}{nearest(key, names)}")
        batched = any(name in BATCH_FIELDS for name in names)
        known = BATCH_FIELDS if batched else SAMPLE_FIELDS
        for parameter in named:
            name = parameter.name
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(f"reward {self.name!r}: argument {name!r} is positional-only; arguments go by name")
            if batched and name in SAMPLE_FIELDS:
                raise ConfigError(f"reward {self.name!r} mixes {name!r} with plural names: use one or the other")
            if name not in known and name not in self.fixed and parameter.default is parameter.empty:
                raise ConfigError(
                    f"reward {self.name!r} asks for {name!r}, which is neither a field of a sample nor configured: "
                    f"configure the argument or give it a default{nearest(name, known)}"
                )
        fields = {name: field for name, field in known.items() if takes_any or name in names}
        if not fields:
            raise ConfigError(f"reward {self.name!r} takes none of {', '.join(SAMPLE_FIELDS)} (or their plurals)")
        return fields, batched

    def score(self, requests: Sequence[ScoringRequest], deadline_s: float | None) -> list[Score | None]:
        """Score requests in order.

        Args:
            requests: Samples to score.
            deadline_s: Seconds for one call of the function. None sets no deadline.

        Returns:
            One entry per request. None marks a request to run again alone, because a coroutine blocked the others.
        """
        if isinstance(self.function, CompositeReward):
            return self.function(requests, deadline_s)
        calls = [requests] if self.batched else [[request] for request in requests]
        if self.is_async:
            outcomes = self._run_concurrently(calls, deadline_s)
        else:
            outcomes = [self._run(call, deadline_s) for call in calls]
        scores: list[Score | None] = []
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome is _UNDECIDED:
                scores += [None] * len(call)
            elif isinstance(outcome, SoftDeadline):
                scores += [failed("timeout", f"{self.name}: no result within {deadline_s} s")] * len(call)
            else:
                scores += read_scores(outcome, self.name, len(call) if self.batched else None)
        return [self._checked(request, score) for request, score in zip(requests, scores, strict=True)]

    def _checked(self, request: ScoringRequest, score: Score | None) -> Score | None:
        if score is None or score.reply is None or request.turns_left:
            return score
        return failed(
            "raised",
            f"{self.name}: the result is text, not a number, and no turn is left for a conversation: return a score "
            "when turns_left is 0, or raise max_turns of EnvironmentConfig (environment.max_turns in a recipe)",
        )

    def _arguments(self, call: Sequence[ScoringRequest]) -> dict[str, Any]:
        columns = {name: [getattr(request, field) for request in call] for name, field in self.fields.items()}
        injected = columns if self.batched else {name: column[0] for name, column in columns.items()}
        return {**injected, **self.fixed}

    def _run(self, call: Sequence[ScoringRequest], deadline_s: float | None) -> object:
        """Return the result of the function, or the exception it raised."""
        try:
            return run_with_deadline(lambda: self.function(**self._arguments(call)), deadline_s)
        except (KeyboardInterrupt, bdb.BdbQuit):
            raise
        except BaseException as error:  # the border to the user's code; the score records the exception
            return error

    def _run_concurrently(self, calls: Sequence[Sequence[ScoringRequest]], deadline_s: float | None) -> list[Any]:
        """Return the result or the exception of each call; `_UNDECIDED` for a call beside a blocking call."""
        loop_blocked = False

        def on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # The event loop drops an exception of a plain callback after this function.
            nonlocal loop_blocked
            if isinstance(context.get("exception"), SoftDeadline):
                loop_blocked = True
            else:
                loop.default_exception_handler(context)

        async def run(call: Sequence[ScoringRequest]) -> Any:
            try:
                async with asyncio.timeout(deadline_s) as limit:
                    return await self.function(**self._arguments(call))
            except TimeoutError as error:
                return _CoroutineDeadline() if limit.expired() else error

        async def run_all() -> list[Any]:
            asyncio.get_running_loop().set_exception_handler(on_loop_error)
            return await asyncio.gather(*(run(call) for call in calls), return_exceptions=True)

        loop_deadline_s = None if deadline_s is None else deadline_s + LOOP_GRACE_S
        try:
            # The loop may swallow an alarm and then block again, so the alarm is repeated.
            outcomes = run_with_deadline(lambda: asyncio.run(run_all()), loop_deadline_s, repeat_s=LOOP_GRACE_S)
        except (SoftDeadline, SystemExit) as error:
            return [error] if len(calls) == 1 else [_UNDECIDED] * len(calls)
        loop_blocked = loop_blocked or any(type(outcome) is SoftDeadline for outcome in outcomes)
        if len(calls) == 1 or not loop_blocked:
            return outcomes
        return [_UNDECIDED if isinstance(outcome, SoftDeadline) else outcome for outcome in outcomes]
