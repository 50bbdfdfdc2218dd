"""Scoring in the calling process, without Ray: for one-process runs in which `breakpoint()` works.

It has the pool's soft deadline (none outside the main thread or under a debugger), but nothing that stops
native code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.deadline import debugging
from rl_plugins.rewards.failures import check_failure_rate
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.routing import Router, check_routes


class InlineScorer:
    """Same interface as `RewardPool`, in this process."""

    def __init__(
        self,
        reward_config: Mapping[str, Any],
        *,
        deadline_s: float | None = None,
        max_failure_rate: float = 0.0,
    ) -> None:
        """Load the rewards.

        Args:
            reward_config: One reward, or a mapping from data_source to rewards (see `routing`).
            deadline_s: Seconds for one call; None for no limit.
            max_failure_rate: Share of failed samples (0 to 1) above which `score` raises.

        Raises:
            ConfigError: The configuration is wrong or a reward cannot be loaded.
        """
        self.reward_config, self.deadline_s, self.max_failure_rate = (
            reward_config,
            deadline_s,
            max_failure_rate,
        )
        self._router = Router(reward_config)

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score in the order of the requests.

        Raises:
            ConfigError: A data_source has no reward.
            RewardFailureError: More than `max_failure_rate` of the samples failed.
        """
        scores = self.answer(requests)
        check_failure_rate(scores, self.max_failure_rate)
        return scores

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score some of the samples of a step, or reply to them; however many fail, that is for the caller to judge."""
        check_routes(self.reward_config, {request.data_source for request in requests})
        deadline_s = None if debugging() else self.deadline_s
        first = self._router.score(requests, deadline_s)
        scores = [
            score or alone
            for request, score in zip(requests, first, strict=True)
            for alone in ([None] if score else self._router.score([request], deadline_s))
        ]
        complete = [score for score in scores if score is not None]
        assert len(complete) == len(requests)
        return complete

    def close(self) -> None:
        """Nothing to release."""


def check_reward(
    reward_config: Mapping[str, Any], sample_request: ScoringRequest, *, deadline_s: float | None = 60.0
) -> Score:
    """Score one sample in this process at start-up, before anything heavy starts.

    Raises:
        ConfigError: The reward cannot be loaded, has no route for the sample, or failed on it.
    """
    score = InlineScorer(reward_config, deadline_s=deadline_s, max_failure_rate=1.0).score([sample_request])[0]
    if score.failure is not None:
        source = sample_request.data_source
        raise ConfigError(f"the reward fails on a sample of data_source {source!r}: {score.failure}: {score.message}")
    return score
