"""Several rewards for the same samples, summed with weights.

    {_target_: rl_plugins.rewards.mixing.WeightedSum,
     rewards: {rule: {_target_: ...}, model: {_target_: ...}},
     weights: {rule: 1.0, model: 0.5}}

The reward of each part becomes a detail of the sample's score under the part's name. A part that fails fails the
sample: a sum without it would be another reward.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.calling import RequestScorer, Scorer
from rl_plugins.rewards.loading import nearest
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.results import failed

_LEAST_S = 1e-3


class WeightedSum(RequestScorer):
    """The weighted sum of named rewards, which may be plain, batched or asynchronous, each called in its own way."""

    def __init__(self, rewards: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float] | None = None) -> None:
        """Load every part.

        Args:
            rewards: configuration of each part, by its name.
            weights: of the parts; 1 for those that are not named.

        Raises:
            ConfigError: there is no part, a weight belongs to none or is not a finite number, or a part cannot be
                loaded.
        """
        if not rewards:
            raise ConfigError("WeightedSum has no rewards: give `rewards`, a mapping from names to rewards")
        for name, weight in (weights or {}).items():
            if name not in rewards:
                raise ConfigError(f"WeightedSum: there is a weight for {name!r}, but no reward{nearest(name, rewards)}")
            if not isinstance(weight, int | float) or not math.isfinite(weight):
                raise ConfigError(f"WeightedSum: the weight of {name!r} is {weight!r}, not a finite number")
        for name, config in rewards.items():
            if not isinstance(config, Mapping):
                raise ConfigError(f"WeightedSum: the reward {name!r} is {config!r}, not a mapping with `_target_`")
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in rewards}
        self.parts = {name: Scorer(config) for name, config in rewards.items()}
        self.batched = any(part.batched for part in self.parts.values())
        self.is_async = any(part.is_async for part in self.parts.values())

    def __call__(self, requests: Sequence[ScoringRequest], deadline_s: float | None) -> list[Score | None]:
        """Score in order; `deadline_s` bounds all parts together.

        Returns:
            None for a request that must run alone: the time of several requests was up, and nobody can tell whose
            fault it was.
        """
        stop = math.inf if deadline_s is None else time.monotonic() + deadline_s
        columns = {name: _scores(part, requests, stop) for name, part in self.parts.items()}
        scores = [self._sum({name: column[row] for name, column in columns.items()}) for row in range(len(requests))]
        if len(requests) == 1:
            return scores
        return [None if score is not None and score.failure == "timeout" else score for score in scores]

    def _sum(self, parts: Mapping[str, Score | None]) -> Score | None:
        value, details = 0.0, {}
        for name, score in parts.items():
            if score is not None and score.failure is not None:
                return failed(score.failure, f"{name}: {score.message}")
        for name, score in parts.items():
            if score is not None and score.reply is not None:
                return failed("raised", f"{name}: a part of a sum cannot answer: it returns a score")
        for name, score in parts.items():
            if score is None or score.value is None:
                return None
            value += self.weights[name] * score.value
            details[name] = score.value
            details |= {f"{name}.{key}": detail for key, detail in score.details.items()}
        if not math.isfinite(value):
            return failed("not_finite", f"WeightedSum: the sum of {details} is {value}")
        return Score(value, details)


def _scores(part: Scorer, requests: Sequence[ScoringRequest], stop: float) -> list[Score | None]:
    def left() -> float | None:
        return None if stop == math.inf else max(round(stop - time.monotonic(), 3), _LEAST_S)

    if part.batched or part.is_async:
        return part.score(requests, left())
    scores: list[Score | None] = []
    for request in requests:
        # What could not be started is tried again alone; alone, it starts in any case and is timed.
        is_late = len(requests) > 1 and time.monotonic() >= stop
        scores += [None] if is_late else part.score([request], left())
    return scores
