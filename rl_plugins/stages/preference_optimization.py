"""Preference optimization: the policy learns from pairs of responses, or from good and bad responses.

`PreferenceOptimization` reads preferences from data. `OnlinePreferenceOptimization` samples and scores responses, and
learns from the best and the worst of each prompt.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.inputs import JUDGED_INPUTS, check_inputs
from rl_plugins.algorithms.preference_losses import PreferenceLoss
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.loaders import PromptSource
from rl_plugins.data.preferences import PairBatch, UnpairedBatch
from rl_plugins.data.prompts import PromptBatch, foreign_batch
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.rewards.inline import Reward
from rl_plugins.stages.arguments import StageArguments
from rl_plugins.stages.metrics import SampleMetrics, TokenMetrics
from rl_plugins.stages.own_module import check_max_tokens
from rl_plugins.stages.preference_examples import PreferenceExamples, best_against_worst, preference_examples
from rl_plugins.stages.preference_learner import PreferenceLearner, PreferenceObjective
from rl_plugins.stages.sampling import (
    AnyEnvironment,
    SamplingSetup,
    Scorer,
    greedy,
    setup_of_validation,
    with_stop_token,
)
from rl_plugins.stages.stage import Stage
from rl_plugins.strategies.contract import Strategy


class PreferenceOptimization(Stage):
    """DPO and related losses, on pairs or judged responses from data.

    Validation samples responses to prompts, for rewards, or measures the loss on rows like the training rows
    (`PreferenceDataModule(validate_on="responses")`).

    A loss of judged responses (KTO) takes pairs, too: chosen responses are good, rejected responses are bad.

    Attributes:
        learner: updates the policy, since `setup`.

    Args:
        policy: see `Stage`.
        scorer: scores responses in validation. A reward function, or its configuration, gets `default_scorer`. None
            without validation on prompts.
        eval_sampling: sampling settings of validation; None without validation on prompts.
        loss: name in `PREFERENCE_LOSSES`, or a function like the functions there.
        loss_options: keyword arguments of the loss, such as `beta`.
        reference: name or folder of the reference model, for losses with a reference; the policy's own by default.
        environment: tools, or bounds on conversations if the scorer answers the policy; by default the policy answers
            once.
        seed: seed of sampling.
        **stage: arguments of `Stage`.

    Raises:
        ConfigError: the loss needs inputs that do not exist, or a reference that is not named.
    """

    compares_log_probs = True

    policy: Any
    learner: PreferenceLearner

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        scorer: Scorer | Reward | None = None,
        eval_sampling: SamplingConfig | None = None,
        loss: str | PreferenceLoss = "dpo",
        loss_options: Mapping[str, Any] | None = None,
        reference: str | None = None,
        environment: AnyEnvironment | None = None,
        seed: int = 0,
        **stage: Unpack[StageArguments],
    ) -> None:
        super().__init__(policy, **stage)
        check_max_tokens(policy, eval_sampling)
        self.sampling_setup = setup_of_validation(scorer, self.tokenizer, eval_sampling, environment, seed)
        self.objective = _objective(self, loss, loss_options, reference)

    @override
    def make_parts(self, strategy: Strategy) -> None:
        super().make_parts(strategy)
        self.learner = PreferenceLearner(self.objective, self.passes, self.optimize, self.tokenizer.pad_token_id)

    @override
    def training_step(self, batch: PairBatch | UnpairedBatch, batch_idx: int) -> None:
        if not isinstance(batch, PairBatch | UnpairedBatch):
            raise foreign_batch(batch, "PreferenceDataModule")
        start = time.perf_counter()
        examples = self._examples(batch)
        metrics = self.learner.update([examples])
        seconds = time.perf_counter() - start
        tokens = float(self.strategy.ranks.sum(examples.samples.sequence_lengths.sum().double()))
        self.end_step({**metrics, "time/step": seconds, "tokens_per_s": tokens / seconds})

    def _examples(self, batch: PairBatch | UnpairedBatch) -> PreferenceExamples:
        if isinstance(batch, UnpairedBatch):
            check_inputs(self.objective.function, self.objective.options, JUDGED_INPUTS, "the data")
        return preference_examples(batch, self.tokenizer.pad_token_id)

    # Validation -------------------------------------------------------------------------------------------------

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        # None without rows with responses.
        self._validated: TokenMetrics | None = None

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not isinstance(batch, PairBatch | UnpairedBatch):
            super().validation_step(batch, batch_idx)
            return
        self._validated = self._validated or TokenMetrics()
        # Parameters gathered in inference mode cannot be trained afterwards.
        with torch.inference_mode(False):
            self.learner.measure(self._examples(batch), self._validated)

    @override
    def on_validation_epoch_end(self) -> None:
        if self._validated is None:
            super().on_validation_epoch_end()
            return
        averages = self.learner.averages(self._validated)
        self.track_validation({name.removeprefix("train/"): value for name, value in averages.items()})


class OnlinePreferenceOptimization(Stage):
    """Samples responses to prompts, scores them, and learns from the best and the worst response of each prompt.

    A prompt whose responses all score alike is left out (`train/uniform_groups` is the share of such groups), and so
    is a response whose reward failed. A step without any pair leaves the policy as it is.

    Attributes:
        learner: updates the policy, since `setup`.
        prompt_source: prompts of the training data, since `setup`.

    Args:
        policy: see `Stage`.
        scorer: gives each sample its reward. A reward function, or its configuration, gets `default_scorer`.
        sampling: sampling settings of training, with `num_samples` of 2 or more. Log-probs are taken at temperature 1.
        eval_sampling: sampling settings of validation; by default greedy with the same length.
        loss: see `PreferenceOptimization`.
        loss_options: see `PreferenceOptimization`.
        reference: see `PreferenceOptimization`.
        environment: tools, or bounds on conversations if the scorer answers the policy; by default the policy answers
            once.
        updates_per_step: optimizer steps of a step, among which the prompts are divided. With one optimizer step,
            the updated policy itself has sampled.
        seed: seed of sampling.
        **stage: arguments of `Stage`.

    Raises:
        ConfigError: `num_samples` is 1, or see `PreferenceOptimization`.
    """

    compares_log_probs = True

    policy: Any
    learner: PreferenceLearner
    prompt_source: PromptSource

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        scorer: Scorer | Reward | None = None,
        sampling: SamplingConfig,
        eval_sampling: SamplingConfig | None = None,
        loss: str | PreferenceLoss = "dpo",
        loss_options: Mapping[str, Any] | None = None,
        reference: str | None = None,
        environment: AnyEnvironment | None = None,
        updates_per_step: int = 1,
        seed: int = 0,
        **stage: Unpack[StageArguments],
    ) -> None:
        super().__init__(policy, **stage)
        eval_sampling = eval_sampling or greedy(sampling)
        check_max_tokens(policy, sampling, eval_sampling)
        self.sampling_setup = SamplingSetup(scorer, self.tokenizer, eval_sampling, environment, seed)
        self.objective = _objective(self, loss, loss_options, reference)
        if sampling.num_samples < 2:
            raise ConfigError(
                f"num_samples={sampling.num_samples}: a pair needs at least two responses to a prompt: raise "
                "num_samples"
            )
        self.sampling = with_stop_token(sampling, self.tokenizer)
        self.updates_per_step = updates_per_step

    @property
    @override
    def optimizer_steps(self) -> int | None:
        # A mini-batch without pairs has no optimizer step.
        return 1 if self.updates_per_step == 1 else None

    @override
    def make_parts(self, strategy: Strategy) -> None:
        super().make_parts(strategy)
        self.learner = PreferenceLearner(self.objective, self.passes, self.optimize, self.tokenizer.pad_token_id)
        self.prompt_source = PromptSource(lambda: self.trainer.train_dataloader, strategy.ranks)

    @override
    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        if not isinstance(prompts, PromptBatch):
            raise foreign_batch(prompts, "PromptDataModule")
        start = time.perf_counter()
        sampled = SampleMetrics()
        metrics = self.learner.update(self.collect(prompts, sampled))
        seconds = time.perf_counter() - start
        ranks = self.strategy.ranks
        metrics |= sampled.averages("train", ranks.sum, ranks.gather, seconds)
        self.end_step(metrics | self.prompt_source.update_curriculum(sampled.group_results()))

    def collect(self, prompts: PromptBatch, sampled: SampleMetrics) -> list[PreferenceExamples]:
        """Sample, score and pair responses; return the pairs of each update. Collective.

        Args:
            prompts: prompts of this rank.
            sampled: collects metrics of the samples.

        Raises:
            DataError: `updates_per_step` does not divide the prompts of a rank.
        """
        if len(prompts.rows) % self.updates_per_step:
            raise DataError(
                f"updates_per_step={self.updates_per_step} does not divide the {len(prompts.rows)} prompts of a rank: "
                "change updates_per_step or prompts_per_step"
            )
        samples = self._sampler.sample(prompts, self.sampling, self.step)
        scores = self._scorer.score(samples)
        self.shown_samples.show_training(samples, scores, prompts)
        sampled.add(samples, scores)
        # Rank r holds the prompts r, r + world_size, ..., so an update has the same prompts for any number of ranks.
        chunks = torch.arange(len(samples)).chunk(self.updates_per_step)
        return [best_against_worst(samples[indices], self.sampling.num_samples) for indices in chunks]


def _objective(
    stage: Stage, loss: str | PreferenceLoss, options: Mapping[str, Any] | None, reference: str | None
) -> PreferenceObjective:
    """Return the objective of a stage, and let the stage load the reference of the loss."""
    objective = PreferenceObjective(loss, dict(options or {}))
    if objective.needs_reference and not stage.add_reference(reference):
        raise ConfigError(
            f"the loss {objective.name} needs log-probs under a reference: name the model with reference=..."
        )
    return objective
