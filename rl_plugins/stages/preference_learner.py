"""Updates of the policy on preferences: pairs of responses, or good and bad responses.

Every loss of `PREFERENCE_LOSSES` is used the same way: log-probs under the reference (if the loss needs them), then one
update over micro-batches with whole pairs, averaged over the examples of the global batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate
from rl_plugins.algorithms.inputs import JUDGED_INPUTS, PAIR_INPUTS, call_with, required_inputs, takes_pairs
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES, PreferenceLoss, kto_reference_point
from rl_plugins.algorithms.registry import named_function
from rl_plugins.data.experience import Experience
from rl_plugins.device_copies import to_device
from rl_plugins.errors import ConfigError
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.metrics import TokenMetrics
from rl_plugins.stages.optimizer import MicroBatchLoss, Optimize
from rl_plugins.stages.preference_examples import PreferenceExamples, mismatched
from rl_plugins.strategies.contract import POLICY, REFERENCE


class PreferenceObjective:
    """A preference loss and its inputs.

    Args:
        loss: name in `PREFERENCE_LOSSES`, or a function like the functions there.
        options: keyword arguments of the loss, such as `beta`.

    Attributes:
        function: the loss.
        takes_pairs: True if the loss compares the two responses of a pair.
        needs_reference_point: True if the loss needs KTO's reference point.
        needs_reference: True if the loss needs log-probs under the reference.

    Raises:
        ConfigError: neither pairs nor judged responses have the inputs of the loss.
    """

    def __init__(self, loss: str | PreferenceLoss, options: Mapping[str, Any]) -> None:
        self.function, self.options = named_function(PREFERENCE_LOSSES, loss, options), options
        self.name, needs = self.function.__name__, set(required_inputs(self.function, options))
        self.takes_pairs = takes_pairs(self.function, options)
        self.needs_reference_point = "reference_point" in needs
        self.needs_reference = self.needs_reference_point or any(name.startswith("ref_") for name in needs)
        if not self.takes_pairs and not needs <= JUDGED_INPUTS:
            raise ConfigError(
                f"the loss {self.name} needs {', '.join(sorted(needs))}: pairs have "
                f"{', '.join(sorted(PAIR_INPUTS))}, and single responses have {', '.join(sorted(JUDGED_INPUTS))}"
            )


@dataclass(frozen=True)
class PreferenceLearner:
    """Takes optimizer steps of the policy on preferences.

    Attributes:
        objective: the loss.
        passes: forward passes of policy and reference.
        optimize: takes an optimizer step of the policy; `Stage.optimize`.
        pad_token_id: token of the padding.
    """

    objective: PreferenceObjective
    passes: ForwardPasses
    optimize: Optimize
    pad_token_id: int

    def update(self, mini_batches: Sequence[PreferenceExamples]) -> dict[str, float]:
        """Take an optimizer step on each mini-batch; return metrics averaged over all examples. Collective.

        A rank may have no example of a mini-batch. A mini-batch that is empty on all ranks has no optimizer step.
        """
        metrics = TokenMetrics()
        total = 0.0
        for mini_batch in mini_batches:
            examples, count = self._examples_of_loss(mini_batch)
            total += count
            if count:
                examples = self._with_reference(examples)
                with self.passes.strategy.phase_log.measure("update_policy"):
                    self.optimize(self._losses(examples, count, metrics), POLICY)
        return {"train/examples": total, **(self.averages(metrics) if total else {})}

    @torch.no_grad()
    def measure(self, mini_batch: PreferenceExamples, metrics: TokenMetrics) -> None:
        """Add losses and rewards of examples to metrics, without an update. Collective."""
        examples, count = self._examples_of_loss(mini_batch)
        if count:
            examples = self._with_reference(examples)
            with self.passes.strategy.phase_log.measure("validate"):
                for _ in self._losses(examples, count, metrics):
                    pass

    def _examples_of_loss(self, mini_batch: PreferenceExamples) -> tuple[PreferenceExamples, float]:
        """Return pairs, or judged responses, as the loss takes them, and their number on all ranks. Collective."""
        is_split = self.objective.takes_pairs or mini_batch.members_NK.shape[1] == 1
        examples = mini_batch if is_split else mini_batch.split()
        return examples, float(self.passes.strategy.ranks.sum(torch.tensor(len(examples), dtype=torch.float64)))

    def averages(self, metrics: TokenMetrics) -> dict[str, float]:
        """Return the metrics averaged over all examples, by their names in training. Collective."""
        ranks = self.passes.strategy.ranks
        averages = metrics.averages(ranks.sum, ranks.max)
        # A step may have only good or only bad responses.
        if not self.objective.takes_pairs and {"train/chosen_reward", "train/rejected_reward"} <= averages.keys():
            averages["train/margin"] = averages["train/chosen_reward"] - averages["train/rejected_reward"]
        return averages

    def _with_reference(self, examples: PreferenceExamples) -> PreferenceExamples:
        """Fill the inputs of the loss from the reference."""
        phases = self.passes.strategy.phase_log
        if self.objective.needs_reference:
            with phases.measure("ref_log_probs"):
                log_probs_R = self._log_probs_without_gradient(REFERENCE, examples.samples)
            examples = replace(examples, ref_log_probs_R=log_probs_R)
        if self.objective.needs_reference_point:
            with phases.measure("reference_point"):
                examples = replace(examples, reference_point=self._reference_point(examples))
        return examples

    def _reference_point(self, examples: PreferenceExamples) -> Tensor:
        ranks = self.passes.strategy.ranks
        samples = mismatched(examples, self.pad_token_id, ranks)
        if samples is None:
            # With one prompt there is no mismatched response, and the reference point is at its lower bound.
            return torch.zeros((), dtype=torch.float64)
        return kto_reference_point(
            mismatched_log_probs_N=self._log_probs_without_gradient(POLICY, samples),
            mismatched_ref_log_probs_N=self._log_probs_without_gradient(REFERENCE, samples),
            sum_over_ranks=ranks.sum,
        )

    def _losses(self, examples: PreferenceExamples, count: float, metrics: TokenMetrics) -> Iterator[MicroBatchLoss]:
        counts = GlobalCounts(count, count, self.passes.strategy.ranks.world_size)
        cutter = self.passes.cutter
        micro_batches = cutter.common_number(examples.lengths)
        examples = examples.padded(micro_batches)
        for position, indices in enumerate(cutter.split(examples.lengths, micro_batches)):
            log_probs_R = self._log_probs(POLICY, examples.samples[examples.members(indices)])
            inputs = examples.loss_inputs(log_probs_R, indices)
            losses_N, values = call_with(self.objective.function, inputs, self.objective.options)
            counted_N = to_device(examples.counted_N[indices], losses_N.device)
            metrics.add({"loss": losses_N}, counted_N)
            if examples.reference_point is not None:
                point = to_device(examples.reference_point.to(losses_N.dtype), losses_N.device)
                metrics.add({"reference_point": point.expand_as(losses_N)}, counted_N)
            if not self.objective.takes_pairs and "reward" in values:
                # The rewards of good and bad responses are separate metrics, like the rewards of pairs.
                reward_N, desirable_N = values.pop("reward"), to_device(examples.desirable_N[indices], losses_N.device)
                metrics.add({"chosen_reward": reward_N}, counted_N & desirable_N)
                metrics.add({"rejected_reward": reward_N}, counted_N & ~desirable_N)
            metrics.add(values, counted_N)
            yield aggregate(losses_N, counted_N.float(), "token-mean", counts), position == micro_batches - 1

    @torch.no_grad()
    def _log_probs_without_gradient(self, name: str, samples: Experience) -> Tensor:
        """Return the log-prob of each response, [R]. Collective."""
        log_probs_R = torch.zeros(len(samples), dtype=torch.promote_types(self.passes.dtype, torch.float32))
        parts: list[tuple[Tensor, Tensor]] = []
        for indices in self.passes.log_prob_batches(samples):
            # All ranks take part in every forward pass, also a rank without further samples.
            is_empty = len(indices) == 0
            run = samples.placeholder(self.pad_token_id) if is_empty else samples[indices]
            sums_R = self._log_probs(name, run)
            if not is_empty:
                parts.append((indices, sums_R))
        if parts:
            # One copy for all passes, because the host waits for a copy from a GPU.
            places_R, sums_R = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            log_probs_R[places_R] = sums_R.to(log_probs_R)
        return log_probs_R

    def _log_probs(self, name: str, samples: Experience) -> Tensor:
        """Return the log-prob of each response, which is the sum over its tokens, [R]."""
        micro = samples.trimmed()
        log_probs_BT = self.passes.log_probs(name, micro, entropy=False).log_probs_BT
        mask_BT = to_device(micro.response_mask.bool(), self.passes.device)
        return torch.where(mask_BT, log_probs_BT, 0).sum(dim=-1)
