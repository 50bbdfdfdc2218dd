"""Scores of samples: from the reward function, and from a reward model beside the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import RewardModelConfig
from rl_plugins.data.experience import Experience, computed
from rl_plugins.errors import ConfigError
from rl_plugins.models.scalar_head import last_token_scores
from rl_plugins.rewards.conversations import Conversations
from rl_plugins.rewards.records import Score, ScoringRequest, check_failure_rate, failed
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.strategies.contract import REWARD_MODEL
from rl_plugins.strategies.phase_log import PhaseLog


@runtime_checkable
class Scorer(Protocol):
    """Scores samples: `RewardPool` (in processes) or `InlineScorer`.

    Both find the reward function of a sample's data source with a `Router`. `RewardPool` ends a call at its deadline.
    `InlineScorer` interrupts Python code only, in the main thread and without a debugger.
    """

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Return one score for each request, in order."""


@dataclass(frozen=True)
class SampleScorer:
    """Scores the samples of a rank with a reward function.

    Attributes:
        scorer: scorer of single responses.
        conversations: conversations of the samples, with scores of the environment; None without an environment.
        phase_log: log of times.
    """

    scorer: Scorer
    conversations: Conversations | None
    phase_log: PhaseLog

    def score(self, samples: Experience) -> list[Score]:
        """Fill `scores` and `valid`. A sample without a score is not valid, and its response mask becomes 0."""
        with self.phase_log.measure("reward"):
            scores = self._scores(samples.columns)
        samples.scores = torch.tensor([score.value or 0.0 for score in scores])
        samples.valid = torch.tensor([score.failure is None for score in scores])
        samples.response_mask = samples.response_mask * samples.valid[:, None]
        return scores

    def _scores(self, columns: Mapping[str, list[Any]]) -> list[Score]:
        if self.conversations is not None:
            return self.conversations.scores(columns["ending"])
        names = ("data_source", "response", "reward_model", "extra_info", "prompt")
        rows = [
            dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)
        ]
        return self.scorer.score([scoring_request(row["response"], row) for row in rows])


@dataclass(frozen=True)
class RewardModelScorer:
    """Adds the scores of a reward model to the scores of the reward function.

    Attributes:
        config: weights of the scores.
        passes: forward passes of the reward model.
    """

    config: RewardModelConfig
    passes: ForwardPasses

    def add(self, samples: Experience, scores: list[Score]) -> list[Score]:
        """Mix the reward model's scores into `scores` of the samples; return scores with the new failures.

        A sample whose mixed score is not finite is not valid, like a sample whose reward function failed.

        Raises:
            RewardError: too many scores are not finite.
        """
        with self.passes.strategy.phase_log.measure("reward_model"):
            model_scores_B = self._model_scores(samples)
        scores_B = self.config.weight * model_scores_B + self.config.rule_weight * computed(samples.scores)
        bad_B = samples.valid & ~scores_B.isfinite()
        samples.valid = samples.valid & ~bad_B
        samples.response_mask = samples.response_mask * samples.valid[:, None]
        samples.scores = scores_B.where(samples.valid, 0.0)
        failures = [
            failed("not_finite", f"the reward model: its score is {value}") if bad else None
            for bad, value in zip(bad_B.tolist(), scores_B.tolist(), strict=True)
        ]
        check_failure_rate(failures, self.config.max_failure_rate)
        return [failure or score for failure, score in zip(failures, scores, strict=True)]

    def _model_scores(self, samples: Experience) -> Tensor:
        scores = self.passes.per_token(samples, lambda micro: {"scores": self.passes.scores(REWARD_MODEL, micro)})
        return last_token_scores(scores["scores"], samples.response_lengths)


def keep_reward_details(samples: Experience, scores: Sequence[Score], algorithm: Algorithm) -> None:
    """Keep the numbers beside the scores that the algorithm uses.

    Raises:
        ConfigError: the reward function does not return a number of the name.
    """
    if names := algorithm.reward_components:
        columns = [_detail(scores, name, "algorithm.reward_components") for name in names]
        samples.component_scores = torch.tensor(columns).T
    metric = algorithm.group_filter and algorithm.group_filter.metric
    if metric:
        samples.set_column("filtered_by", _detail(scores, metric, "algorithm.group_filter.metric"))


def _detail(scores: Sequence[Score], name: str, option: str) -> list[float]:
    """Return a number of the reward function beside each score; 0 for a sample without a score."""
    for score in scores:
        if score.failure is None and name not in score.details:
            there = ", ".join(score.details) or "nothing"
            raise ConfigError(f"{option} names {name!r}, and the reward function returns {there} beside its score")
    return [score.details.get(name, 0.0) for score in scores]


def scoring_request(response: str, row: Mapping[str, Any]) -> ScoringRequest:
    """Return the request to score a response to the prompt of a row."""
    ground_truth = (row["reward_model"] or {}).get("ground_truth")
    return ScoringRequest(row["data_source"], response, ground_truth, row["extra_info"] or {}, row["prompt"])
