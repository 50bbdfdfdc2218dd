"""Calls of reward functions: the function for a sample by its `data_source`, arguments by name, under a deadline.

    {default: {...}, "openai/gsm8k": {...}}      one reward per data source, `default` for all others
    {_target_: ...}                              one reward for everything

A function asks for any of `data_source`, `solution_str`, `ground_truth`, `extra_info`, `prompt`, `messages`,
`turns_left`, `token_ids` (one sample), or for the plurals `data_sources`, `solution_strs`, ... (a batch; the function
returns a list of the same length). The calls of a coroutine function run concurrently. A function returns a number, or
a mapping with "score" and further numbers, or with "token_rewards". As an environment with turns left, a function may
also return a reply to the policy: text, or a message with "role" and "content".

An exception of a call is recorded, never turned into a number. If a batched call fails, every sample of the call is
marked as failed, because the sample at fault is unknown.
"""

from __future__ import annotations

import bdb
import inspect
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rl_plugins.errors import ConfigError, DataError
from rl_plugins.python_file import nearest
from rl_plugins.rewards.loading import load_callable, name_of
from rl_plugins.rewards.records import Score, ScoringRequest, failed, for_tokens, read_scores
from rl_plugins.user_code import UNDECIDED, SoftDeadline, only_one_process, run_concurrently, run_with_deadline

_FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")
ARGUMENTS_OF_SAMPLE = {field: field for field in (*_FIELDS, "messages", "turns_left", "token_ids")}
ARGUMENTS_OF_BATCH = {f"{field}s": field for field in _FIELDS} | {
    "conversations": "messages",
    "turns_lefts": "turns_left",
    "token_id_lists": "token_ids",
}


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
            config: configuration of one reward (see `loading`).

        Raises:
            ConfigError: the function cannot be loaded, asks for an argument outside the fields of a sample and the
                configuration, mixes singular and plural names, or does not take a configured argument.
        """
        self.name, self.function, self.fixed = load_callable(config, "reward")
        if isinstance(self.function, CompositeReward):
            self.is_async, self.batched = self.function.is_async, self.function.batched
            return
        self.is_async = inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 (an instance's method)
        )
        self._read_signature()

    def _read_signature(self) -> None:
        """Find the requested fields of a sample by argument (`fields`), and the way to call the function.

        Raises:
            ConfigError: see `__init__`.
        """
        parameters = inspect.signature(self.function).parameters.values()
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        names = [parameter.name for parameter in named]
        for key in self.fixed:
            if key in ARGUMENTS_OF_SAMPLE or key in ARGUMENTS_OF_BATCH:
                raise ConfigError(f"reward {self.name!r}: {key!r} comes from the sample and cannot be configured")
            if key not in names and not takes_any:
                raise ConfigError(f"reward {self.name!r} takes no argument {key!r}{nearest(key, names)}")
        self.batched = any(name in ARGUMENTS_OF_BATCH for name in names)
        known = ARGUMENTS_OF_BATCH if self.batched else ARGUMENTS_OF_SAMPLE
        for parameter in named:
            name = parameter.name
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ConfigError(f"reward {self.name!r}: argument {name!r} is positional-only; arguments go by name")
            if self.batched and name in ARGUMENTS_OF_SAMPLE:
                raise ConfigError(f"reward {self.name!r} mixes {name!r} with plural names: use one or the other")
            if name not in known and name not in self.fixed and parameter.default is parameter.empty:
                raise ConfigError(
                    f"reward {self.name!r} asks for {name!r}, which is neither a field of a sample nor configured: "
                    f"configure the argument or give it a default{nearest(name, known)}"
                )
        self.fields = {name: field for name, field in known.items() if takes_any or name in names}
        # A function that takes any argument may do without tokens.
        self._needs_tokens = any(known.get(name) == "token_ids" for name in names)
        if not self.fields:
            raise ConfigError(f"reward {self.name!r} takes none of {', '.join(ARGUMENTS_OF_SAMPLE)} (or their plurals)")

    def score(self, requests: Sequence[ScoringRequest], deadline_s: float | None) -> list[Score | None]:
        """Score requests in order.

        Args:
            requests: samples to score.
            deadline_s: seconds for one call of the function. None sets no deadline.

        Returns:
            One entry per request. None marks a request to run again alone, because a coroutine blocked the others.
        """
        if isinstance(self.function, CompositeReward):
            return self.function(requests, deadline_s)
        if self._needs_tokens and any(request.token_ids is None for request in requests):
            message = f"{self.name}: asks for token_ids, and these responses are texts without tokens: score in a run"
            return [failed("raised", message)] * len(requests)
        calls = [requests] if self.batched else [[request] for request in requests]
        outcomes: list[object]
        with only_one_process(self.name):
            if self.is_async:
                outcomes = run_concurrently([partial(self._call, call) for call in calls], deadline_s)
            else:
                outcomes = [self._run(call, deadline_s) for call in calls]
        scores: list[Score | None] = []
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome is UNDECIDED:
                scores += [None] * len(call)
            elif isinstance(outcome, SoftDeadline):
                scores += [failed("timeout", f"{self.name}: no result within {deadline_s} s")] * len(call)
            elif isinstance(outcome, MemoryError):
                message = (
                    f"{self.name}: a reward worker may take no more memory: need less, or raise memory_mb (in a "
                    "recipe: reward.memory_mb)"
                )
                scores += [failed("memory", message)] * len(call)
            else:
                scores += read_scores(outcome, self.name, len(call) if self.batched else None)
        return [self._checked(request, score) for request, score in zip(requests, scores, strict=True)]

    def _checked(self, request: ScoringRequest, score: Score | None) -> Score | None:
        if score is None:
            return None
        if score.reply is None or request.turns_left:
            num_tokens = None if request.token_ids is None else len(request.token_ids)
            return for_tokens(score, num_tokens, self.name)
        return failed(
            "raised",
            f"{self.name}: the result is text, not a number, and no turn is left for a conversation: return a score "
            "when turns_left is 0, or raise max_turns of EnvironmentConfig (environment.max_turns in a recipe)",
        )

    def _arguments(self, call: Sequence[ScoringRequest]) -> dict[str, Any]:
        columns = {name: [_argument(request, field) for request in call] for name, field in self.fields.items()}
        injected = columns if self.batched else {name: column[0] for name, column in columns.items()}
        return {**injected, **self.fixed}

    def _call(self, call: Sequence[ScoringRequest]) -> Any:
        return self.function(**self._arguments(call))

    def _run(self, call: Sequence[ScoringRequest], deadline_s: float | None) -> object:
        """Return the result of the function, or the exception it raised."""
        try:
            return run_with_deadline(lambda: self._call(call), deadline_s)
        except (KeyboardInterrupt, bdb.BdbQuit):
            raise
        except BaseException as error:  # of the user's code; the score records the exception
            return error


def _argument(request: ScoringRequest, field: str) -> Any:
    value = getattr(request, field)
    return value.tolist() if isinstance(value, array) else value


# Choice of the function by data source ------------------------------------------------------------------------------


def normalize_routes(reward_config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Bring both forms of a reward configuration to {data source or "default": reward}.

    Raises:
        ConfigError: no reward is configured, or a route is not a mapping.
    """
    target = reward_config.get("_target_")
    if isinstance(target, str) or callable(target) or isinstance(reward_config.get("path"), str):
        return {"default": reward_config}
    routes = {str(source): reward_config[source] for source in reward_config}
    if not routes:
        raise ConfigError("no reward is configured: give `_target_`, or a mapping from data_source to rewards")
    for source, route in routes.items():
        if not isinstance(route, Mapping):
            raise ConfigError(f"the reward for data_source {source!r} is {route!r}, not a mapping with `_target_`")
    return routes


def route_of(reward_config: Mapping[str, Any], data_source: str) -> Mapping[str, Any]:
    """Return the configuration of the reward of a data source that has a reward (see `check_routes`)."""
    routes = normalize_routes(reward_config)
    return routes.get(data_source) or routes["default"]


def check_routes(reward_config: Mapping[str, Any], data_sources: Iterable[str]) -> None:
    """Check that every data source of a data set has a reward, before a run starts. No reward is loaded.

    Raises:
        ConfigError: a data source has no reward. The message names the data sources without and with a reward.
    """
    routes = normalize_routes(reward_config)
    unknown = sorted(set(data_sources) - set(routes))
    if unknown and "default" not in routes:
        raise ConfigError(
            f"no reward for data_source {', '.join(map(repr, unknown))}: there are rewards for "
            f"{', '.join(map(repr, sorted(routes)))}; add the missing ones, or a `default`"
        )


def check_requests(reward_config: Mapping[str, Any], requests: Sequence[ScoringRequest]) -> None:
    """Check in a running run that every request has a reward.

    Raises:
        DataError: the data source of a request has no reward.
    """
    try:
        check_routes(reward_config, {request.data_source for request in requests})
    except ConfigError as error:
        raise DataError(str(error)) from None


class Router:
    """Loaded rewards of one process."""

    def __init__(self, reward_config: Mapping[str, Any], when_loading: Callable[[str], None] | None = None) -> None:
        """Load every reward.

        Args:
            reward_config: one reward, or a mapping from data source to reward.
            when_loading: function to call with the name of a reward before the reward is loaded.

        Raises:
            ConfigError: the configuration is wrong or a reward cannot be loaded.
        """
        self.functions = {}
        for source, route in normalize_routes(reward_config).items():
            if when_loading is not None:
                when_loading(name_of(route))
            self.functions[source] = RewardFunction(route)

    def score(
        self, requests: Sequence[ScoringRequest], deadline_s: float | None, budget_s: float = float("inf")
    ) -> list[Score | None]:
        """Score requests in order.

        Args:
            requests: samples to score.
            deadline_s: seconds for one call of a reward function. None sets no deadline.
            budget_s: seconds after which no further call starts.

        Returns:
            One entry per request. None marks a request to run later, or to run again alone. A single request never has
            None.
        """
        scores: list[Score | None] = [None] * len(requests)
        stop = time.monotonic() + budget_s
        for function, rows in self._calls(requests):
            for row, score in zip(rows, function.score([requests[row] for row in rows], deadline_s), strict=True):
                scores[row] = score
            if time.monotonic() > stop:
                break
        return scores

    def _calls(self, requests: Sequence[ScoringRequest]) -> Iterator[tuple[RewardFunction, list[int]]]:
        rows_of_source: dict[str, list[int]] = {}
        for row, request in enumerate(requests):
            source = request.data_source if request.data_source in self.functions else "default"
            rows_of_source.setdefault(source, []).append(row)
        for source, rows in rows_of_source.items():
            function = self.functions[source]
            if function.batched or function.is_async:
                yield function, rows
            else:
                yield from ((function, [row]) for row in rows)
