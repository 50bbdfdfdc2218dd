"""Online preference optimization: the pairs are the policy's own best and worst responses to each prompt."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.stages.metrics import SampleMetrics
from rl_plugins.stages.preference_examples import PreferenceExamples, best_against_worst
from rl_plugins.stages.preference_optimization import PreferenceOptimization
from rl_plugins.stages.sampling import greedy


class OnlinePreferenceOptimization(PreferenceOptimization):
    """Samples responses to prompts, scores them, and updates on the best against the worst of each prompt.

    Prompts whose responses all score alike teach nothing (`train/uniform_groups` is their share), and responses whose
    reward failed are never used. A step in which no prompt teaches anything leaves the policy as it is.

    Args:
        policy: see `Stage`.
        sampling: how training samples are drawn; `num_samples` is 2 or more. Log-probs are taken at temperature 1.
        eval_sampling: how `validate` samples; greedy with the same length by default.
        updates_per_step: optimizer steps per step; its prompts are dealt over them. With one, the policy that is
            updated is the one that sampled.
        **preference_optimization: arguments of `PreferenceOptimization`.
    """

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        sampling: SamplingConfig,
        eval_sampling: SamplingConfig | None = None,
        updates_per_step: int = 1,
        **preference_optimization: Any,
    ) -> None:
        super().__init__(policy, eval_sampling=eval_sampling or greedy(sampling), **preference_optimization)
        if sampling.num_samples < 2:
            raise ConfigError(
                f"num_samples={sampling.num_samples}: a pair takes two responses to a prompt or more; raise "
                "batch.samples_per_prompt"
            )
        self.sampling = self.ending(sampling)
        self.updates_per_step = updates_per_step
        self._sampled = SampleMetrics()

    @override
    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:  # type: ignore[override]
        start = time.perf_counter()
        metrics = self.update(self.collect(prompts))
        seconds = time.perf_counter() - start
        sampled = self._sampled.averages("train", self._strategy.sum_over_ranks, self._strategy.gather, seconds)
        self.end_step({**sampled, **metrics, **self.tell_curriculum(self._sampled)})

    def collect(self, prompts: PromptBatch) -> list[PreferenceExamples]:
        """Sample, score, and pair; the pairs of each update. Collective.

        Raises:
            ConfigError: the prompts of a rank cannot be dealt over the updates.
        """
        if len(prompts.rows) % self.updates_per_step:
            raise ConfigError(
                f"updates_per_step={self.updates_per_step} does not divide the {len(prompts.rows)} prompts of a rank: "
                "change updates_per_step or prompts_per_step"
            )
        experience = self.sample(prompts, self.sampling, self._seeds(prompts))
        self._sampled = SampleMetrics()
        self._sampled.add(experience, self.score(experience))
        # Ranks hold prompts in turn, so an update is the same set of prompts for any number of ranks.
        chunks = torch.arange(len(experience)).chunk(self.updates_per_step)
        return [best_against_worst(experience[indices], self.sampling.num_samples) for indices in chunks]
