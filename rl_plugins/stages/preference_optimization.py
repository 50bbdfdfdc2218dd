"""Preference optimization: the policy learns from pairs of responses which one is better, or which ones are good.

Every loss of `PREFERENCE_LOSSES` goes the same way: log-probs under the reference (if the loss asks for them), then one
update over micro-batches that never split a pair, averaged over the examples of the global batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate
from rl_plugins.algorithms.injection import call_with, named_function, required_inputs
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss, kto_reference_point
from rl_plugins.data.experience import Experience
from rl_plugins.data.preferences import PairBatch, UnpairedBatch
from rl_plugins.data.tokenization import check_same_tokens
from rl_plugins.errors import ConfigError
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.stages.dealing import Table
from rl_plugins.stages.labelled_examples import placeholder
from rl_plugins.stages.metrics import TokenMetrics
from rl_plugins.stages.micro_batches import Lengths
from rl_plugins.stages.preference_examples import (
    JUDGED_INPUTS,
    PAIR_INPUTS,
    PreferenceExamples,
    mismatched,
    preference_examples,
)
from rl_plugins.stages.sampling import SamplingOptions, SamplingStage
from rl_plugins.stages.stage import comes_with_adapter
from rl_plugins.strategies.contract import POLICY, REFERENCE


class PreferenceOptimization(SamplingStage):
    """DPO and its kin, on pairs or judged responses from the data; validation by generation.

    A loss of judged responses (KTO) takes the responses of pairs, too: the chosen ones are good, the others bad.

    Args:
        policy: see `Stage`.
        eval_sampling: see `SamplingStage`.
        loss: name in `PREFERENCE_LOSSES`, or a function like those.
        loss_options: keyword arguments of the loss, such as `beta`.
        reference: name or folder of the reference model, for losses that ask for one; the policy's own by default.
        **sampling_stage: arguments of `SamplingStage`.
    """

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        eval_sampling: SamplingConfig,
        loss: str | PreferenceLoss = "dpo",
        loss_options: Mapping[str, Any] | None = None,
        reference: str | None = None,
        **sampling_stage: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(policy, eval_sampling=eval_sampling, **sampling_stage)
        self.loss_options = dict(loss_options or {})
        self.loss = named_function(PREFERENCE_LOSSES, loss, self.loss_options)
        needs = set(required_inputs(self.loss, self.loss_options))
        self.takes_pairs = needs <= PAIR_INPUTS
        if not self.takes_pairs and not needs <= JUDGED_INPUTS:
            raise ConfigError(
                f"the loss {self.loss.__name__} needs {', '.join(sorted(needs))}: there is "
                f"{', '.join(sorted(PAIR_INPUTS))} of pairs, or {', '.join(sorted(JUDGED_INPUTS))} of single responses"
            )
        self._needs_reference_point = "reference_point" in needs
        self._needs_reference = self._needs_reference_point or any(name.startswith("ref_") for name in needs)
        self.reference: Any = None
        self._own_path = policy if isinstance(policy, str) else None
        self._reference_path = reference or self._own_path
        if self._needs_reference and self._reference_path is None and not comes_with_adapter(policy):
            raise ConfigError(
                f"the loss {self.loss.__name__} needs log-probs under a reference: name the model with reference=..."
            )

    # Models -----------------------------------------------------------------------------------------------------

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if self._needs_reference and self.reference is None:
            path = self._reference_path
            if path not in (None, self._own_path):
                check_same_tokens(self.tokenizer, str(path), "reference")
            self.reference = self.load_reference(path)

    @override
    def engine_modules(self) -> dict[str, nn.Module]:
        others = {} if self.reference is None else {REFERENCE: self.reference}
        return {**super().engine_modules(), **others}

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: PairBatch | UnpairedBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        if self.takes_pairs and isinstance(batch, UnpairedBatch):
            raise ConfigError(
                f"the loss {self.loss.__name__} takes pairs, and the data is single responses with labels: leave out "
                "label_key, or use loss=kto"
            )
        examples = preference_examples(batch, self.tokenizer.pad_token_id)
        metrics = self.update([examples])
        seconds = time.perf_counter() - start
        tokens = float(self._strategy.sum_over_ranks(examples.samples.sequence_lengths.sum().double()))
        self.end_step({**metrics, "time/step": seconds, "tokens_per_s": tokens / seconds})

    def update(self, mini_batches: list[PreferenceExamples]) -> dict[str, float]:
        """One optimizer step on each; returns the metrics of all together, averaged over all ranks. Collective.

        A rank may have no example of a mini-batch; where no rank has one, there is no optimizer step.
        """
        metrics = TokenMetrics()
        total = 0.0
        for mini_batch in mini_batches:
            examples = mini_batch if self.takes_pairs or mini_batch.members_NK.shape[1] == 1 else mini_batch.split()
            count = float(self._strategy.sum_over_ranks(torch.tensor(len(examples), dtype=torch.float64)))
            total += count
            if count:
                examples = self._with_reference(examples)
                with self._phase("update_policy"):
                    self.optimize(self._losses(examples, count, metrics))
        return {"train/examples": total, **(self._averages(metrics) if total else {})}

    def _averages(self, metrics: TokenMetrics) -> dict[str, float]:
        averages = metrics.averages(self._strategy.sum_over_ranks, self._strategy.max_over_ranks)
        if not self.takes_pairs and "train/chosen_reward" in averages:
            averages["train/margin"] = averages["train/chosen_reward"] - averages["train/rejected_reward"]
        return averages

    def _with_reference(self, examples: PreferenceExamples) -> PreferenceExamples:
        """Fill what the loss asks for beside the policy's log-probs of the examples."""
        if self._needs_reference:
            with self._phase("ref_log_probs"):
                examples = replace(examples, ref_log_probs_R=self._frozen_log_probs(REFERENCE, examples.samples))
        if self._needs_reference_point:
            with self._phase("reference_point"):
                examples = replace(examples, reference_point=self._reference_point(examples))
        return examples

    def _reference_point(self, examples: PreferenceExamples) -> Tensor:
        table = Table(self.trainer.global_rank, self.trainer.world_size, self._strategy.gather, self._strategy.exchange)
        samples = mismatched(examples, self.tokenizer.pad_token_id, table)
        if samples is None:
            # One prompt has no other: the reference point is at its lower bound.
            return torch.zeros((), dtype=torch.float64)
        return kto_reference_point(
            mismatched_log_probs_N=self._frozen_log_probs(POLICY, samples),
            mismatched_ref_log_probs_N=self._frozen_log_probs(REFERENCE, samples),
            sum_over_ranks=self._strategy.sum_over_ranks,
        )

    def _losses(
        self, examples: PreferenceExamples, count: float, metrics: TokenMetrics
    ) -> Iterator[tuple[Tensor, bool]]:
        counts = GlobalCounts(count, count, self.trainer.world_size)
        cutter = self.cutter
        micro_batches = cutter.common_number(examples.lengths)
        examples = examples.padded(micro_batches)
        for position, indices in enumerate(cutter.split(examples.lengths, micro_batches)):
            log_probs_R = self._log_probs(POLICY, examples.samples[examples.members(indices)])
            losses_N, values = call_with(self.loss, examples.loss_inputs(log_probs_R, indices), self.loss_options)
            counted_N = examples.counted_N[indices].to(losses_N.device)
            metrics.add({"loss": losses_N}, counted_N)
            if examples.reference_point is not None:
                metrics.add({"reference_point": examples.reference_point.to(losses_N).expand_as(losses_N)}, counted_N)
            if not self.takes_pairs and "reward" in values:
                # Those of good and bad responses are told apart, as those of pairs are.
                reward_N, desirable_N = values.pop("reward"), examples.desirable_N[indices].to(losses_N.device)
                metrics.add({"chosen_reward": reward_N}, counted_N & desirable_N)
                metrics.add({"rejected_reward": reward_N}, counted_N & ~desirable_N)
            metrics.add(values, counted_N)
            yield aggregate(losses_N, counted_N.float(), "token-mean", counts), position == micro_batches - 1

    # Log-probs --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _frozen_log_probs(self, name: str, samples: Experience) -> Tensor:
        """Log-prob of each response, [R], without gradient. Collective."""
        log_probs_R = torch.zeros(len(samples), dtype=torch.promote_types(self.model_dtype, torch.float32))
        for indices in self.cutter.indices(Lengths.of(samples)):
            # Ranks meet in every forward pass, also those that have no more samples.
            there = len(indices) > 0
            micro = samples[indices] if there else placeholder(self.tokenizer.pad_token_id)
            sums_R = self._log_probs(name, micro)
            if there:
                log_probs_R[indices] = sums_R.to(log_probs_R)
        return log_probs_R

    def _log_probs(self, name: str, samples: Experience) -> Tensor:
        """Log-prob of each response: the sum over its tokens, [R]."""
        micro = samples.trimmed().to(self.device)
        with self.running(name) as engine:
            log_probs_BT = response_log_probs(engine, **self.forward_inputs(micro)).log_probs_BT
        return torch.where(micro.response_mask.bool(), log_probs_BT, 0).sum(dim=-1)
