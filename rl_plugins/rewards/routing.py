"""`data_source` decides which scorer scores a sample.

    {default: {...}, "openai/gsm8k": {...}}      one reward per data source, `default` for all others
    {_target_: ...}                              one reward for everything

Names are checked up front with `check_routes`, which loads no reward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.calling import Scorer
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
        ConfigError: Names the data sources without a reward, and those that have one.
    """
    routes = normalize_routes(reward_config)
    unknown = sorted(set(data_sources) - set(routes))
    if unknown and "default" not in routes:
        raise ConfigError(
            f"no reward for data_source {', '.join(map(repr, unknown))}: there are rewards for "
            f"{', '.join(map(repr, sorted(routes)))}; add the missing ones, or a `default`"
        )


class Router:
    """The loaded scorers of one process."""

    def __init__(self, reward_config: Mapping[str, Any]) -> None:
        """Load every scorer. Raises ConfigError as `Scorer` does."""
        self.scorers = {source: Scorer(route) for source, route in normalize_routes(reward_config).items()}

    def score(
        self, requests: Sequence[ScoringRequest], deadline_s: float | None, budget_s: float = float("inf")
    ) -> list[Score | None]:
        """Score in order of the requests; start no further call once `budget_s` seconds have gone.

        Returns:
            None for a request that was not started, or that must be run alone. One request is never None.
        """
        scores: list[Score | None] = [None] * len(requests)
        stop = time.monotonic() + budget_s
        for scorer, rows in self._calls(requests):
            for row, score in zip(rows, scorer.score([requests[row] for row in rows], deadline_s), strict=True):
                scores[row] = score
            if time.monotonic() > stop:
                break
        return scores

    def _calls(self, requests: Sequence[ScoringRequest]) -> Iterator[tuple[Scorer, list[int]]]:
        rows_of: dict[str, list[int]] = {}
        for row, request in enumerate(requests):
            source = request.data_source if request.data_source in self.scorers else "default"
            rows_of.setdefault(source, []).append(row)
        for source, rows in rows_of.items():
            scorer = self.scorers[source]
            if scorer.batched or scorer.is_async:
                yield scorer, rows
            else:
                yield from ((scorer, [row]) for row in rows)
