"""Updates of the policy and its critics on the experience of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.masked import sequence_means
from rl_plugins.algorithms.policy_losses.modifiers import top_entropy_mask
from rl_plugins.algorithms.regularization import Coefficient
from rl_plugins.config.sampling import Schedule
from rl_plugins.data.experience import Experience, computed
from rl_plugins.device_copies import to_device
from rl_plugins.errors import DataError
from rl_plugins.rollout.engine import step_seed
from rl_plugins.stages.critics import Critic
from rl_plugins.stages.forward_passes import ForwardPasses
from rl_plugins.stages.metrics import TokenMetrics, mean_over_ranks
from rl_plugins.stages.off_policy import compares_with_sampler
from rl_plugins.stages.optimizer import MicroBatchLoss, Optimize
from rl_plugins.strategies.contract import POLICY


class PolicyLearner:
    """Takes the optimizer steps of policy optimization.

    Args:
        algorithm: losses, and controllers of the coefficients.
        passes: forward passes of the models.
        optimize: takes an optimizer step of a model; `Stage.optimize`.
        critics: critics of the policy, possibly none.
        schedule: bound on staleness.
        num_samples: size of a group.
        updates_per_step: optimizer steps for each pass over the samples.
        passes_per_step: passes over the samples of a step.
        seed: seed of random choices.
        kl_controller: coefficient of the KL penalty.
        entropy_controller: coefficient of the entropy bonus.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        passes: ForwardPasses,
        optimize: Optimize,
        critics: Sequence[Critic],
        *,
        schedule: Schedule,
        num_samples: int,
        updates_per_step: int,
        passes_per_step: int,
        seed: int,
        kl_controller: Coefficient,
        entropy_controller: Coefficient,
    ) -> None:
        self._algorithm, self._passes, self._optimize = algorithm, passes, optimize
        self._critics = critics
        self._num_samples, self._seed = num_samples, seed
        self._updates_per_step, self._passes_per_step = updates_per_step, passes_per_step
        self._updates = updates_per_step * passes_per_step
        self._compares_with_sampler = compares_with_sampler(algorithm, schedule)
        self._strategy = passes.strategy
        self._kl_controller, self._entropy_controller = kl_controller, entropy_controller

    def update(self, batch: Experience, step: int) -> dict[str, float]:
        """Take the optimizer steps of RL step `step`; return the metrics, averaged over all ranks. Collective."""
        tokens, learns = TokenMetrics(), not any(critic.warms_up(step) for critic in self._critics)
        for number, mini_batch in enumerate(self._mini_batches(batch), 1):
            for critic in self._critics:
                critic.update(mini_batch, tokens, last=number == self._updates)
            if learns:
                with self._strategy.phase_log.measure("update_policy"):
                    self._choose_tokens(mini_batch, step, number)
                    # A generator: each forward pass runs after the backward pass of the micro-batch before.
                    self._optimize(self._policy_losses(mini_batch, tokens, first=number == 1), POLICY)
        if not learns:
            # A sample carries the number of its step as its version. The next phase sends the unchanged weights again,
            # to set the new number.
            self._strategy.rollout_phases.weights_changed()
        metrics = tokens.averages(self._strategy.ranks.sum, self._strategy.ranks.max)
        for critic in self._critics:
            metrics |= critic.wait_for_updates() | critic.metrics(batch)
        return metrics | self._update_coefficients(batch, metrics, learns=learns)

    def _mini_batches(self, batch: Experience) -> Iterator[Experience]:
        """Divide the prompts of the step among the optimizer steps.

        Rank r holds the prompts r, r + world_size, ..., so a mini-batch is the same set of prompts for any number of
        ranks.
        """
        if batch.shape[0] % (self._updates_per_step * self._num_samples):
            prompts = batch.shape[0] // self._num_samples
            raise DataError(
                f"updates_per_step={self._updates_per_step} does not divide the {prompts} prompts of a rank: "
                "change updates_per_step or prompts_per_step"
            )
        for _ in range(self._passes_per_step):
            yield from batch.chunk(self._updates_per_step)

    def _choose_tokens(self, mini_batch: Experience, step: int, number: int) -> None:
        """Fill `loss_mask` and `selected`, which depend on the whole mini-batch of all ranks.

        Args:
            mini_batch: samples of one optimizer step.
            step: number of finished steps.
            number: number of the optimizer step within the step; a sample has other random tokens in every pass.
        """
        modifiers, num_samples = self._algorithm.modifiers, self._num_samples
        if modifiers.top_entropy is not None:
            mini_batch.loss_mask = top_entropy_mask(
                entropy_BT=computed(mini_batch.entropy),
                response_mask_BT=mini_batch.response_mask,
                share=modifiers.top_entropy,
                gather_over_ranks=self._gather,
            )
        ids_B = mini_batch.groups * num_samples + torch.arange(len(mini_batch)) % num_samples
        mini_batch.selected = self._algorithm.select(
            {**mini_batch.named_tensors(), "log_probs_BT": mini_batch.old_log_probs, "ids_B": ids_B},
            seed=step_seed(step_seed(self._seed, step), number),
            sum_over_ranks=self._strategy.ranks.sum,
            gather_over_ranks=self._gather,
        )

    def _gather(self, values_N: Tensor) -> Tensor:
        return torch.cat(self._strategy.ranks.gather(values_N))

    def _policy_losses(self, mini_batch: Experience, metrics: TokenMetrics, *, first: bool) -> Iterator[MicroBatchLoss]:
        world_size = self._strategy.ranks.world_size
        counts, positive_counts = self._passes.counts(mini_batch.response_mask, mini_batch.rejected), None
        if self._algorithm.modifiers.positive_nll:
            positive_mask_BT = mini_batch.response_mask * computed(mini_batch.is_positive)[:, None]
            positive_counts = self._passes.counts(positive_mask_BT)
        micro_batches = self._passes.micro_batches(mini_batch)
        for position, indices in enumerate(micro_batches):
            on_host = mini_batch[indices].trimmed()
            current = self._passes.log_probs(POLICY, on_host, entropy_gradient=self._algorithm.entropy.active)
            micro = to_device(on_host, self._passes.device)
            current_BT = current.log_probs_BT.detach()
            if self._compares_with_sampler:
                old_BT = micro.rollout_log_probs
            else:
                # Before its first update, the policy is the old policy.
                old_BT = current_BT if first else computed(micro.old_log_probs)
            entropy_BT = computed(current.entropy_BT)
            tensors = self._algorithm.corrected(
                {
                    **micro.named_tensors(),
                    "log_probs_BT": current.log_probs_BT,
                    "old_log_probs_BT": old_BT,
                    "entropy_BT": entropy_BT,
                    "top_log_probs_BTK": current.log_probs_BTK,
                }
            )
            loss, values = self._algorithm.loss(
                tensors,
                kl_coefficient=self._kl_controller.coefficient,
                entropy_coefficient=self._entropy_controller.coefficient,
                counts=counts,
                positive_counts=positive_counts,
            )
            metrics.add_each({**values, "entropy": entropy_BT}, tensors["response_mask_BT"])
            # Later updates have moved the policy away from the sampler.
            if first or not self._compares_with_sampler:
                gap_BT = ((current_BT if first else old_BT) - micro.rollout_log_probs).abs()
                metrics.add({"rollout_gap": gap_BT}, micro.response_mask, maximum=True)
            if self._passes.router_replay is not None:
                differing_N = self._passes.differing_experts(on_host)
                metrics.add({"router_differing": differing_N}, torch.ones_like(differing_N))
            # `aggregate` multiplies the loss by the number of ranks, because model engines average gradients.
            metrics.add_sum("loss", loss.detach() / (world_size * self._updates))
            yield loss, position == len(micro_batches) - 1
            if self._passes.router_replay is not None:
                self._passes.router_replay.stop()

    def _update_coefficients(
        self, batch: Experience, metrics: Mapping[str, float], *, learns: bool
    ) -> dict[str, float]:
        """Update the controllers if the policy learns, and return their coefficients."""
        ranks, mask_BT = self._strategy.ranks, batch.response_mask
        num_sequences = batch.shape[0] * ranks.world_size
        adapted: dict[str, float] = {}
        if self._algorithm.kl_is_in_reward:
            kl_B = sequence_means(
                self._algorithm.kl_to_reference(computed(batch.old_log_probs), computed(batch.ref_log_probs), mask_BT),
                mask_BT,
            )
            measured = mean_over_ranks({"train/kl": (kl_B, mask_BT.bool().any(dim=-1))}, ranks.sum)
            # Without a counted token there is no measure.
            adapted |= {name: value for name, value in measured.items() if not math.isnan(value)}
        kl = {**metrics, **adapted}.get("train/kl")
        if kl is not None:
            if learns:
                self._kl_controller.update(kl, num_sequences)
            adapted["train/kl_coefficient"] = self._kl_controller.coefficient
        if self._algorithm.entropy.active and "train/entropy" in metrics:
            self._entropy_controller.update(metrics["train/entropy"], num_sequences)
            adapted["train/entropy_coefficient"] = self._entropy_controller.coefficient
        return adapted
