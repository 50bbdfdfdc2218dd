"""One scorer: a reward function with its arguments injected by name, called under a deadline.

A function asks for any of `data_source`, `solution_str`, `ground_truth`, `extra_info`, `prompt`, `messages`,
`turns_left` (one sample), or for the plurals `data_sources`, `solution_strs`, ... (a batch; it returns a list of the
same length). It may be a coroutine function: its calls then run concurrently. It returns a number, or a mapping with
"score" and further numbers; or, as an environment while turns are left, what it says to the policy: text, or a message
with "role" and "content". `deadline_s` bounds one call. What a call raises is recorded, never turned into a number;
if a batched call fails, every sample of that call is marked, since nobody can tell whose fault it was.
"""

from __future__ import annotations

import asyncio
import bdb
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.deadline import SoftDeadline, run_with_deadline
from rl_plugins.rewards.loading import load_reward, nearest
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.results import failed, read_scores

_FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")
SAMPLE_FIELDS = {field: field for field in (*_FIELDS, "messages", "turns_left")}
BATCH_FIELDS = {f"{field}s": field for field in _FIELDS} | {"conversations": "messages", "turns_lefts": "turns_left"}
LOOP_GRACE_S = 0.5
_UNDECIDED = object()


class RequestScorer(ABC):
    """A reward that takes whole requests and their deadline into its own hands, such as one made of others.

    Attributes:
        batched: whether it wants many requests at once.
        is_async: whether it waits for many requests at once.
    """

    batched: bool
    is_async: bool

    @abstractmethod
    def __call__(self, requests: Sequence[ScoringRequest], deadline_s: float | None) -> list[Score | None]:
        """Score in order; None marks a request that must run alone. One request is never None."""


class Scorer:
    """A loaded reward function that turns requests into scores."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Load the function and work out how to call it.

        Raises:
            ConfigError: The function cannot be loaded, asks for an argument that is neither injected nor
                configured, mixes singular and plural names, or does not take a configured argument.
        """
        self.name, self.function, self.fixed = load_reward(config)
        if isinstance(self.function, RequestScorer):
            self.is_async, self.batched = self.function.is_async, self.function.batched
            return
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 (an instance's method)
        )
        self.fields, self.batched = self._injected_fields()

    def _injected_fields(self) -> tuple[dict[str, str], bool]:
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
                    f"reward {self.name!r} asks for {name!r}, which is neither injected nor configured: "
                    f"configure it or give it a default{nearest(name, known)}"
                )
        fields = {name: field for name, field in known.items() if takes_any or name in names}
        if not fields:
            raise ConfigError(f"reward {self.name!r} takes none of {', '.join(SAMPLE_FIELDS)} (or their plurals)")
        return fields, batched

    def score(self, requests: Sequence[ScoringRequest], deadline_s: float | None) -> list[Score | None]:
        """Score in order; None marks a request that must run alone: a coroutine blocked the others."""
        if isinstance(self.function, RequestScorer):
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
            "when turns_left is 0; environment.max_turns says how often the policy may speak",
        )

    def _arguments(self, call: Sequence[ScoringRequest]) -> dict[str, Any]:
        columns = {name: [getattr(request, field) for request in call] for name, field in self.fields.items()}
        injected = columns if self.batched else {name: column[0] for name, column in columns.items()}
        return {**injected, **self.fixed}

    def _run(self, call: Sequence[ScoringRequest], deadline_s: float | None) -> Any:
        """The function's result, or what it raised."""
        try:
            return run_with_deadline(lambda: self.function(**self._arguments(call)), deadline_s)
        except (KeyboardInterrupt, bdb.BdbQuit):
            raise
        except BaseException as error:  # the border to the user's code; a Score will tell what it raised
            return error

    def _run_concurrently(self, calls: Sequence[Sequence[ScoringRequest]], deadline_s: float | None) -> list[Any]:
        async def run(call: Sequence[ScoringRequest]) -> Any:
            try:
                async with asyncio.timeout(deadline_s) as limit:
                    return await self.function(**self._arguments(call))
            except TimeoutError as error:
                return _Expired() if limit.expired() else error

        async def run_all() -> list[Any]:
            return await asyncio.gather(*(run(call) for call in calls), return_exceptions=True)

        loop_deadline_s = None if deadline_s is None else deadline_s + LOOP_GRACE_S
        try:
            outcomes = run_with_deadline(lambda: asyncio.run(run_all()), loop_deadline_s)
        except (SoftDeadline, SystemExit) as error:
            return [error] if len(calls) == 1 else [_UNDECIDED] * len(calls)
        if len(calls) == 1 or not any(type(outcome) is SoftDeadline for outcome in outcomes):
            return outcomes
        return [_UNDECIDED if isinstance(outcome, SoftDeadline) else outcome for outcome in outcomes]


class _Expired(SoftDeadline):
    """A coroutine's own deadline passed, in an orderly way."""
