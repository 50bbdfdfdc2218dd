"""Scoring in the calling process, without Ray: for one-process runs in which `breakpoint()` works.

`InlineScorer` has the soft deadline of `RewardPool` (none outside the main thread or under a debugger), and no hard
deadline for native code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl_plugins.config.models import RewardConfig
from rl_plugins.rewards.calling import Router, check_requests
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import FailureRate, Score, ScoringRequest
from rl_plugins.user_code import debugging

Reward = Callable[..., Any] | Mapping[str, Any]


class InlineScorer:
    """Scorer in this process, with the interface of `RewardPool`."""

    def __init__(
        self,
        reward_config: Mapping[str, Any],
        *,
        deadline_s: float | None = None,
        max_failure_rate: float = 0.0,
    ) -> None:
        """Load the rewards.

        Args:
            reward_config: one reward, or a mapping from data source to reward (see `calling`).
            deadline_s: seconds for one call of a reward function. None sets no limit.
            max_failure_rate: share of failed samples (0 to 1) above which `score` raises an error; see `FailureRate`.

        Raises:
            ConfigError: the configuration is wrong or a reward cannot be loaded.
        """
        self.reward_config = reward_config
        self.deadline_s, self.max_failure_rate = deadline_s, max_failure_rate
        self._failure_rate = FailureRate(max_failure_rate)
        self._router = Router(reward_config)

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score requests in order.

        Raises:
            DataError: a data source has no reward.
            RewardError: more than `max_failure_rate` of the samples failed.
        """
        scores = self.answer(requests)
        self._failure_rate.add(scores)
        return scores

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score or reply to requests in order, and leave the check of the failure rate to the caller.

        Raises:
            DataError: a data source has no reward.
        """
        check_requests(self.reward_config, requests)
        deadline_s = None if debugging() else self.deadline_s
        first = self._router.score(requests, deadline_s)
        # A request without a score runs again, alone.
        scores = [
            score or self._router.score([request], deadline_s)[0]
            for request, score in zip(requests, first, strict=True)
        ]
        complete = [score for score in scores if score is not None]
        assert len(complete) == len(requests)
        return complete

    def close(self) -> None:
        """Do nothing: there is no resource to release."""


def default_scorer(reward: Reward) -> RewardPool | InlineScorer:
    """Return a scorer for a bare reward: a pool of workers where Ray runs, an inline scorer elsewhere.

    The deadline of a call and the allowed share of failed rewards are the defaults of a recipe.

    Args:
        reward: reward function, or reward configuration (see `calling`). A function of the script itself is sent to
            the workers by value. The workers import the module of any other function.

    Raises:
        ConfigError: the function asks for an argument that samples do not have, or cannot be loaded.
    """
    config = reward if isinstance(reward, Mapping) else {"_target_": reward}
    deadline_s, max_failure_rate = RewardConfig.deadline_s, RewardConfig.max_failure_rate
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return RewardPool(config, num_workers=1, deadline_s=deadline_s, max_failure_rate=max_failure_rate)
    return InlineScorer(config, deadline_s=deadline_s, max_failure_rate=max_failure_rate)
