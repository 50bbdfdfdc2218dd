"""The samples of a step: sampled, scored, and chosen by the group filter and the resampling of the algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.models import RewardModelConfig
from rl_plugins.config.sampling import SamplingConfig, Schedule
from rl_plugins.data.experience import Experience, computed
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import DataError, RewardError
from rl_plugins.models.scalar_head import last_token_scores
from rl_plugins.rewards.records import FailureRate, Score, failed
from rl_plugins.rollout.engine import step_seed
from rl_plugins.stages.balancing import GroupBuffer, resample_over_ranks
from rl_plugins.stages.experience_maker import shape_rewards
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.metrics import SampleMetrics
from rl_plugins.stages.sampling import PromptSampler, SampleScorer, ShownSamples, greedy
from rl_plugins.stages.scheduled_sampler import ScheduledSampler, group_seed


class Rollouts:
    """Collects the samples of a step.

    Args:
        sampler: sampler of responses.
        scorer: scorer of samples, with the environment if there is one.
        algorithm: says which scores and groups it needs.
        sampling: sampling settings; `num_samples` is the size of a group.
        schedule: bounds on staleness and on groups in flight.
        models: reward model and cost model whose scores are added, possibly none.
        updates_per_step: number of mini-batches, and so of optimizer steps of one pass over the samples.
        max_steps: number of steps of the run; 0 for no bound.
        draw: returns this rank's next batch of prompts.
        shown: samples for callbacks.

    Attributes:
        scheduled_sampler: queue of the groups of this step and of later steps.
        sample_metrics: metrics of all samples of a step, also of samples left out by the algorithm.
        on_collected: function of the samples of a batch of prompts, the scores, and the number of batches that the step
            drew before. The samples change later.
        replay: function of the number of batches that the step drew before. The function returns recorded samples and
            their scores, which replace sampling.
    """

    def __init__(
        self,
        sampler: PromptSampler,
        scorer: SampleScorer,
        algorithm: Algorithm,
        sampling: SamplingConfig,
        schedule: Schedule,
        *,
        models: Sequence[ModelScorer],
        updates_per_step: int,
        max_steps: int,
        draw: Callable[[], PromptBatch],
        shown: ShownSamples,
    ) -> None:
        self._sampler, self._scorer, self._models = sampler, scorer, models
        self._algorithm, self._sampling, self._schedule = algorithm, sampling, schedule
        self._updates_per_step, self._shown = updates_per_step, shown
        self._ranks = sampler.strategy.ranks
        self.scheduled_sampler = ScheduledSampler(sampler, sampling, schedule, max_steps=max_steps, draw=draw)
        self.sample_metrics = SampleMetrics()
        self.on_collected: Callable[[Experience, list[Score], int], None] | None = None
        self.replay: Callable[[int], tuple[Experience, list[Score]]] | None = None
        self._batches_collected = 0

    def collect(self, prompts: PromptBatch, step: int) -> Experience:
        """Return the scored samples of a step. Collective.

        Args:
            prompts: this rank's prompts of the step's batch. The samples may belong to earlier prompts (schedule).
            step: number of finished steps, which is also the version of the policy.
        """
        self._batches_collected, self.sample_metrics = 0, SampleMetrics()
        num_groups = len(prompts)
        if self.replay is None:
            self.scheduled_sampler.begin_step(prompts)
        if self._algorithm.group_filter is None:
            samples = self._collect_groups(num_groups, step)
        else:
            samples = self._informative_groups(step, num_groups)
        if self._algorithm.resampling is not None:
            samples = resample_over_ranks(
                samples,
                self._algorithm.resampling,
                self._sampling.num_samples,
                self._updates_per_step,
                step_seed(self._sampler.seed, step),
                self._ranks,
            )
        return samples

    def _collect_groups(self, count: int, step: int) -> Experience:
        if self.replay is None:
            samples, scores = self._sample_and_score(count, step)
        else:
            samples, scores = self.replay(self._batches_collected)
            self._add_missing_details(samples, scores)
        if self.on_collected is not None:
            self.on_collected(samples, scores, self._batches_collected)
        self._batches_collected += 1
        self.sample_metrics.add(samples, scores)
        return samples

    def _add_missing_details(self, samples: Experience, scores: Sequence[Score]) -> None:
        """Keep the details of rewards that another algorithm than the algorithm of the dump uses.

        Raises:
            DataError: the algorithm needs a number that only sampling gives.
        """
        if "baseline_rewards_B" in self._algorithm.needs and samples.baseline_scores is None:
            raise DataError(
                "the dump has no greedy responses, which the advantage needs: dump a run with the same advantage"
            )
        costs = samples.costs
        has_cost_model = any(model.field == "costs" for model in self._models)
        if has_cost_model and costs is None:
            raise DataError("the dump has no scores of the cost model: dump a run with the same cost model")
        keep_reward_details(samples, scores, self._algorithm)
        if has_cost_model:
            # The costs of the dump have the scores of the cost model.
            samples.costs = costs

    def _informative_groups(self, step: int, num_groups: int) -> Experience:
        """Draw groups until enough groups are informative (dynamic sampling). Collective.

        A synchronous schedule draws a whole batch of prompts again. A schedule with groups in flight takes as many
        groups as are missing, while the engine samples others.

        Raises:
            DataError: `max_batches` did not yield enough groups.
            ConfigError: the data loader cannot draw further prompts.
        """
        group_filter = self._algorithm.group_filter
        assert group_filter is not None
        world_size = self._ranks.world_size
        wanted = num_groups // group_filter.oversampling * world_size
        buffer = GroupBuffer(self._ranks, self._sampling.num_samples)
        taken, missing = 0, num_groups
        while True:
            samples = self._collect_groups(missing, step)
            taken += missing
            kept_B = group_filter.informative(
                scores_B=self._filtered_scores(samples),
                groups_B=samples.groups,
                valid_B=samples.valid,
                truncated_B=samples.truncated,
            )
            groups = buffer.add(samples, kept_B, self._batches_collected)
            if len(groups) >= wanted:
                return buffer.take(groups[:wanted], self._updates_per_step)
            if taken >= group_filter.max_batches * num_groups:
                raise DataError(
                    f"step {step + 1}: {taken * world_size} prompts gave {len(groups)} groups to train on, "
                    f"and the step needs {wanted}: the prompts are too easy or too hard for this policy. Change the "
                    "data, widen algorithm.group_filter, raise its max_batches, or raise num_samples"
                )
            if self._schedule.active:
                missing = math.ceil((wanted - len(groups)) / world_size)

    def _filtered_scores(self, samples: Experience) -> Tensor:
        assert self._algorithm.group_filter is not None
        if self._algorithm.group_filter.metric is None:
            return computed(samples.scores)
        return torch.tensor(list(samples.columns["filtered_by"]))

    def _sample_and_score(self, count: int, step: int) -> tuple[Experience, list[Score]]:
        # If scores decide which groups are trained on, groups change ranks after scoring.
        chosen_by_scores = self._algorithm.group_filter is not None or self._algorithm.resampling is not None
        prompts, samples = self.scheduled_sampler.take_groups(
            count, step=step, mini_batches=0 if chosen_by_scores else self._updates_per_step
        )
        scores = self._score(samples)
        self._shown.show_training(samples, scores, prompts)
        if "baseline_rewards_B" in self._algorithm.needs:
            self._add_greedy_baseline(samples, prompts, step)
        return samples, scores

    def _score(self, samples: Experience) -> list[Score]:
        scores = self._scorer.score(samples)
        keep_reward_details(samples, scores, self._algorithm)
        for model in self._models:
            scores = model.add(samples, scores)
        return scores

    def _add_greedy_baseline(self, samples: Experience, prompts: PromptBatch, step: int) -> None:
        """Fill `baseline_scores` with the shaped score of a greedy response to each prompt. Collective."""
        # An environment starts the greedy response like the samples of the group.
        numbers = samples.groups[:: self._sampling.num_samples].tolist()
        seeds = [group_seed(self._sampler.seed, number) for number in numbers]
        baseline = self._sampler.sample(prompts, greedy(self._sampling), step, seeds)
        self.sample_metrics.add_greedy(self._score(baseline))
        shape_rewards(baseline, self._algorithm)
        # Without a score of the greedy response there is no baseline for the group.
        samples.valid = samples.valid & baseline.valid.repeat_interleave(self._sampling.num_samples)
        samples.response_mask = samples.response_mask * samples.valid[:, None]
        samples.baseline_scores = computed(baseline.scores).repeat_interleave(self._sampling.num_samples)

    def metrics(self, samples: Experience, step: int, seconds: float) -> dict[str, float]:
        """Return the metrics of a step's samples, and of the schedule. Collective.

        Args:
            samples: samples that the step trained on.
            step: number of finished steps, which is also the version of the policy.
            seconds: duration of the step.
        """
        metrics = self.sample_metrics.averages("train", self._ranks.sum, self._ranks.gather, seconds)
        return metrics if self.replay is not None else metrics | self.scheduled_sampler.metrics(samples, step, seconds)


@dataclass
class ModelScorer:
    """Adds the scores of a reward model or a cost model to the numbers of the reward function.

    Attributes:
        name: name of the model.
        field: field of the samples with the numbers of the reward function: `scores` or `costs`.
        config: weights of the scores.
        passes: forward passes of the model.
    """

    name: str
    field: str
    config: RewardModelConfig
    passes: ForwardPasses

    def __post_init__(self) -> None:
        """Begin to count failures."""
        self._failure_rate = FailureRate(self.config.max_failure_rate)

    def add(self, samples: Experience, scores: list[Score]) -> list[Score]:
        """Mix the model's scores into the field of the samples; return `scores` with the new failures.

        A sample whose mixed score is not finite is not valid, like a sample whose reward function failed.

        Raises:
            RewardError: too many scores are not finite.
        """
        with self.passes.strategy.phase_log.measure(self.name):
            model_scores_B = self._model_scores(samples)
        of_function_B = computed(getattr(samples, self.field))
        scores_B = self.config.weight * model_scores_B + self.config.rule_weight * of_function_B
        bad_B = samples.valid & ~scores_B.isfinite()
        samples.valid = samples.valid & ~bad_B
        samples.response_mask = samples.response_mask * samples.valid[:, None]
        setattr(samples, self.field, scores_B.where(samples.valid, 0.0))
        if self.field == "scores":
            samples.token_level_scores = self.config.rule_weight * computed(samples.token_level_scores)
        failures = [
            failed("not_finite", f"the {self.name.replace('_', ' ')}: its score is {value}") if bad else None
            for bad, value in zip(bad_B.tolist(), scores_B.tolist(), strict=True)
        ]
        self._failure_rate.add(failures)
        return [failure or score for failure, score in zip(failures, scores, strict=True)]

    def _model_scores(self, samples: Experience) -> Tensor:
        scores = self.passes.per_token(samples, lambda micro: {"scores": self.passes.scores(self.name, micro)})
        return last_token_scores(scores["scores"], samples.response_lengths)


def keep_reward_details(samples: Experience, scores: Sequence[Score], algorithm: Algorithm) -> None:
    """Keep the numbers beside the scores that the algorithm uses.

    Raises:
        RewardError: the reward function does not return a number of the name.
    """
    if names := algorithm.reward_components:
        columns = [_detail(scores, name, "algorithm.reward_components") for name in names]
        samples.component_scores = torch.tensor(columns).T
    if algorithm.constraint is not None:
        name = algorithm.constraint.cost
        costs = [0.0] * len(scores) if name is None else _detail(scores, name, "algorithm.constraint.cost")
        samples.costs = torch.tensor(costs)
    metric = algorithm.group_filter and algorithm.group_filter.metric
    if metric:
        samples.set_column("filtered_by", _detail(scores, metric, "algorithm.group_filter.metric"))


def _detail(scores: Sequence[Score], name: str, option: str) -> list[float]:
    """Return a number of the reward function beside each score; 0 for a sample without a score."""
    for score in scores:
        if score.failure is None and name not in score.details:
            there = ", ".join(score.details) or "nothing"
            raise RewardError(f"{option} names {name!r}, and the reward function returns {there} beside its score")
    return [score.details.get(name, 0.0) for score in scores]
