"""Choice of the reward for each sample by the sample's `data_source`.

    {default: {...}, "openai/gsm8k": {...}}      one reward per data source, `default` for all others
    {_target_: ...}                              one reward for everything

`check_routes` checks names before a run starts and loads no reward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl_plugins.errors import ConfigError, DataError
from rl_plugins.rewards.calling import RewardFunction
from rl_plugins.rewards.loading import name_of
from rl_plugins.rewards.records import Score, ScoringRequest


def normalize_routes(reward_config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Bring both forms of a reward configuration to {data source or "default": reward}.

    Raises:
        ConfigError: No reward is configured, or a route is not a mapping.
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


def check_routes(reward_config: Mapping[str, Any], data_sources: Iterable[str]) -> None:
    """Check that every data source of a data set has a reward.

    Raises:
        ConfigError: A data source has no reward. The message names the data sources without and with a reward.
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
        DataError: The data source of a request has no reward.
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
            reward_config: One reward, or a mapping from data source to reward.
            when_loading: Function to call with the name of a reward before the reward is loaded.

        Raises:
            ConfigError: The configuration is wrong or a reward cannot be loaded.
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
            requests: Samples to score.
            deadline_s: Seconds for one call of a reward function. None sets no deadline.
            budget_s: Seconds after which no further call starts.

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
