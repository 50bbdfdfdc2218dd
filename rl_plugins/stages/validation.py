"""Validation by generation: the policy answers validation prompts, and the answers are scored and measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.prompts import PromptBatch, foreign_batch
from rl_plugins.evaluation.measures import final_answer, measure, summarize
from rl_plugins.rewards.records import Score
from rl_plugins.rollout.engine import sample_seed
from rl_plugins.stages.metrics import interval_metrics, mean_details, mean_over_ranks, sum_details
from rl_plugins.stages.sampling import PromptSampler, SampleScorer, sample_rows

_WITH_IMAGES = 64
"""Number of samples whose images are kept, as thumbnails."""


class GenerationValidation:
    """Samples and scores responses to validation prompts.

    Args:
        sampler: sampler of responses.
        scorer: reward function.
        sampling: sampling settings.

    Attributes:
        rows: a row of a table for each sample of this rank.

    Example:
        >>> validation.start()
        >>> for prompts in loader:
        ...     validation.add(prompts, step)
        >>> metrics = validation.metrics()
    """

    def __init__(self, sampler: PromptSampler, scorer: SampleScorer, sampling: SamplingConfig) -> None:
        self._sampler, self._scorer, self._sampling = sampler, scorer, sampling
        self.start()

    def start(self) -> None:
        """Forget the samples of the validation before."""
        self.rows: list[dict[str, Any]] = []
        self._scores: list[Score] = []
        # Data source and measures of each prompt, by the number of its row.
        self._measures: dict[int, tuple[str, dict[str, float]]] = {}

    def add(self, prompts: PromptBatch, step: int) -> None:
        """Sample, score and measure responses to this rank's prompts, which may be none. Collective."""
        if not isinstance(prompts, PromptBatch):
            raise foreign_batch(prompts, "PromptDataModule")
        if not prompts.rows:
            self._sampler.generate(prompts, self._sampling, [], step)
            return
        # Each validation has the same seeds, so an environment gives a row the same task. No training sample has a seed
        # of four numbers.
        seeds = [sample_seed(self._sampler.seed, row, 0, 1) for row in prompts.rows]
        samples = self._sampler.sample(prompts, self._sampling, step, seeds)
        scores = self._scorer.score(samples)
        self._scores += scores
        answers = [ending.last for ending in samples.columns.get("ending", ())] or samples.columns["response"]
        self._measure(prompts, scores, answers)
        self.rows += sample_rows(samples, scores, prompts, _WITH_IMAGES - len(self.rows))

    def _measure(self, prompts: PromptBatch, scores: Sequence[Score], responses: Sequence[str]) -> None:
        size = self._sampling.num_samples
        for position, (row, source) in enumerate(zip(prompts.rows, prompts.columns["data_source"], strict=True)):
            group = slice(position * size, (position + 1) * size)
            values, answers = [score.value for score in scores[group]], map(final_answer, responses[group])
            self._measures[row] = source, measure(values, list(answers), [size])

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the samples of all ranks. Collective."""
        strategy = self._sampler.strategy
        values = torch.tensor([score.value or 0.0 for score in self._scores], dtype=torch.float64)
        valid = torch.tensor([score.failure is None for score in self._scores], dtype=torch.bool)
        metrics = mean_over_ranks({"reward": (values, valid)}, strategy.ranks.sum)
        # The mean says nothing about samples without a reward.
        metrics["reward_failures"] = float(strategy.ranks.sum((~valid).sum().double()))
        gathered = strategy.ranks.gather((self._measures, sum_details(self._scores)))
        # In the order of the rows, because the intervals must not depend on the number of ranks.
        measured = [entry for _, entry in sorted(item for measures, _ in gathered for item in measures.items())]
        metrics |= mean_details(details for _, details in gathered)
        metrics |= interval_metrics(summarize([source for source, _ in measured], [of for _, of in measured]))
        return metrics
