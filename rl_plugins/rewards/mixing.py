"""Weighted sum of several rewards for the same samples.

    {_target_: rl_plugins.rewards.mixing.WeightedSum,
     rewards: {rule: {_target_: ...}, model: {_target_: ...}},
     weights: {rule: 1.0, model: 0.5}}

The value of each part becomes a detail of the sample's score, under the name of the part. If a part fails, the sample
fails, because a sum without the part would be another reward. Rewards of tokens are added in the same way. Counts and
costs of judges keep their names, are added, and stay in a failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.python_file import nearest
from rl_plugins.rewards.calling import CompositeReward, RewardFunction
from rl_plugins.rewards.records import SUMMED_DETAILS, Score, ScoringRequest, failed

_MIN_DEADLINE_S = 1e-3


class WeightedSum(CompositeReward):
    """Weighted sum of named rewards. Each part is called in its own way: plain, batched or asynchronous."""

    def __init__(self, rewards: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float] | None = None) -> None:
        """Load every part.

        Args:
            rewards: configuration of each part, by the name of the part.
            weights: weight of each part, by the name of the part. A part without an entry has weight 1.

        Raises:
            ConfigError: there is no part, a weight belongs to no part or is not a finite number, or a part cannot be
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
        self.parts = {name: RewardFunction(config) for name, config in rewards.items()}
        self.batched = any(part.batched for part in self.parts.values())
        self.is_async = any(part.is_async for part in self.parts.values())

    def __call__(self, requests: Sequence[ScoringRequest], deadline_s: float | None) -> list[Score | None]:
        """Score requests in order.

        Args:
            requests: samples to score.
            deadline_s: seconds for all parts together. None sets no deadline.

        Returns:
            One entry per request. None marks a request to run again alone: the time of several requests was up, and
            the request at fault is unknown.
        """
        stop = math.inf if deadline_s is None else time.monotonic() + deadline_s
        columns = {name: _scores(part, requests, stop) for name, part in self.parts.items()}
        scores = [self._sum({name: column[row] for name, column in columns.items()}) for row in range(len(requests))]
        if len(requests) == 1:
            return scores
        return [None if score is not None and score.failure == "timeout" else score for score in scores]

    def _sum(self, parts: Mapping[str, Score | None]) -> Score | None:
        score = self._sum_of_parts(parts)
        if score is None:
            return None
        sums: dict[str, float] = {}
        for part in filter(None, parts.values()):
            for name in part.details.keys() & SUMMED_DETAILS:
                sums[name] = sums.get(name, 0.0) + part.details[name]
        return replace(score, details={**score.details, **sums})

    def _sum_of_parts(self, parts: Mapping[str, Score | None]) -> Score | None:
        """Return the sum without the details that are added."""
        products, details = list[float](), {}
        token_rewards: list[float] | None = None
        for name, score in parts.items():
            if score is not None and score.failure is not None:
                return failed(score.failure, f"{name}: {score.message}")
        for name, score in parts.items():
            if score is not None and score.reply is not None:
                return failed("raised", f"{name}: a part of a sum cannot reply: return a score")
        for name, score in parts.items():
            if score is None or score.value is None:
                return None
            products.append(self.weights[name] * score.value)
            details[name] = score.value
            details |= {f"{name}.{key}": detail for key, detail in score.details.items() if key not in SUMMED_DETAILS}
            if (rewards := score.token_rewards) is not None:
                before = [0.0] * len(rewards) if token_rewards is None else token_rewards
                if len(before) != len(rewards):
                    fault = f"{len(rewards)} 'token_rewards', and a part before has {len(before)}"
                    return failed("raised", f"{name}: has {fault}: return one number for each sampled token")
                token_rewards = [
                    total + self.weights[name] * reward for total, reward in zip(before, rewards, strict=True)
                ]
        value = sum(products)
        if not math.isfinite(value):
            return failed("not_finite", f"WeightedSum: the sum of {details} is {value}")
        if token_rewards is not None and not all(map(math.isfinite, token_rewards)):
            return failed("not_finite", "WeightedSum: a sum of 'token_rewards' is not finite")
        # The exact sum, rounded once: 0.7 + 0.2 + 0.1 is 1.
        return Score(math.fsum(products), details, token_rewards=token_rewards)


def _scores(part: RewardFunction, requests: Sequence[ScoringRequest], stop: float) -> list[Score | None]:
    def remaining_s() -> float | None:
        return None if stop == math.inf else max(round(stop - time.monotonic(), 3), _MIN_DEADLINE_S)

    if part.batched or part.is_async:
        return part.score(requests, remaining_s())
    scores: list[Score | None] = []
    for request in requests:
        # A late request runs again alone. A single request starts in any case, with a deadline.
        is_late = len(requests) > 1 and time.monotonic() >= stop
        scores += [None] if is_late else part.score([request], remaining_s())
    return scores
