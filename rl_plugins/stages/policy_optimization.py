"""Policy optimization: sample, score, compute advantages, update. One RL step is one Lightning batch.

The algorithm is an `Algorithm`; the strategy owns the models, the rollout engine and the memory; the scorer scores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from rl_plugins.algorithms.aggregation import GlobalCounts, local_counts
from rl_plugins.algorithms.masked import sequence_means
from rl_plugins.algorithms.policy_losses.modifiers import top_entropy_mask
from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError
from rl_plugins.stages.collecting import CollectingStage
from rl_plugins.stages.critic import explained_variance
from rl_plugins.stages.critic_pool import CriticPool
from rl_plugins.stages.fields import filled, named_tensors
from rl_plugins.stages.metrics import TokenMetrics, mean_over_ranks
from rl_plugins.strategies.contract import CRITIC, POLICY


class PolicyOptimization(CollectingStage):
    """GRPO, PPO and their kin. Arguments: see `CollectingStage`."""

    @override
    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        experience = self.collect(prompts)
        metrics = self.update(experience)
        seconds = time.perf_counter() - start
        sampled = self._sampled.averages("train", self._strategy.sum_over_ranks, self._strategy.gather, seconds)
        if self.replayed is None:
            sampled |= self.schedule_metrics(experience, seconds)
        self.end_step({**sampled, **metrics, **self.tell_curriculum(self._sampled)})

    def update(self, experience: Experience) -> dict[str, float]:
        """Optimizer steps on the experience; returns the metrics of the step, averaged over all ranks."""
        tokens = TokenMetrics()
        policy_learns = self.critic_config is None or self.step >= self.critic_config.warmup_steps
        for number, mini_batch in enumerate(self._mini_batches(experience), 1):
            if self.critic_config is not None:
                with self._phase("update_critic"):
                    self._update_critic(mini_batch, tokens, last=number == self._updates)
            if policy_learns:
                with self._phase("update_policy"):
                    self.choose_tokens(mini_batch)
                    self.optimize(self._policy_losses(mini_batch, tokens, first=number == 1))
        if not policy_learns:
            # What is sampled next is named after this step, though the weights are those of the last.
            self._strategy.weights_changed()
        metrics = tokens.averages(self._strategy.sum_over_ranks, self._strategy.max_over_ranks)
        if isinstance(self.critic, CriticPool):
            # It has learnt while the policy did.
            with self._phase("update_critic"):
                metrics |= self.critic.learnt()
        return {**metrics, **self._adapt(experience, metrics)}

    # Updating ---------------------------------------------------------------------------------------------------

    def _mini_batches(self, experience: Experience) -> Iterator[Experience]:
        """Deal the prompts of the step, in their order, over the optimizer steps.

        Ranks hold prompts in turn, so a mini-batch is the same set of prompts for any number of ranks.
        """
        if experience.shape[0] % (self.updates_per_step * self.sampling.num_samples):
            prompts = experience.shape[0] // self.sampling.num_samples
            raise ConfigError(
                f"updates_per_step={self.updates_per_step} does not divide the {prompts} prompts of a rank: "
                "change updates_per_step or prompts_per_step"
            )
        for _ in range(self.passes_per_step):
            yield from experience.chunk(self.updates_per_step)

    def choose_tokens(self, mini_batch: Experience) -> None:
        """Fill `loss_mask` and `selected`, which depend on the whole mini-batch of all ranks."""
        modifiers, num_samples = self.algorithm.modifiers, self.sampling.num_samples
        if modifiers.top_entropy is not None:
            mini_batch.loss_mask = top_entropy_mask(
                entropy_BT=filled(mini_batch.entropy),
                response_mask_BT=mini_batch.response_mask,
                share=modifiers.top_entropy,
                gather_over_ranks=self._gather,
            )
        ids_B = mini_batch.groups * num_samples + torch.arange(len(mini_batch)) % num_samples
        mini_batch.selected = self.algorithm.select(
            {**named_tensors(mini_batch), "log_probs_BT": mini_batch.old_log_probs, "ids_B": ids_B},
            seed=self._step_seed,
            sum_over_ranks=self._strategy.sum_over_ranks,
            gather_over_ranks=self._gather,
        )

    def _gather(self, values_N: Tensor) -> Tensor:
        return torch.cat(self._strategy.gather(values_N))

    def _counts(self, mask_BT: Tensor) -> GlobalCounts:
        tokens, sequences = self._strategy.sum_over_ranks(local_counts(mask_BT)).tolist()
        return GlobalCounts(tokens, sequences, self.trainer.world_size)

    def _policy_losses(
        self, mini_batch: Experience, metrics: TokenMetrics, *, first: bool
    ) -> Iterator[tuple[Tensor, bool]]:
        # The old policy is the one that is updated: the ratio is 1 by construction.
        is_old = first and not self._ratio_to_rollout
        counts, positive_counts = self._counts(mini_batch.response_mask), None
        if self.algorithm.modifiers.positive_nll:
            positive_B = self.algorithm.is_positive(filled(mini_batch.scores))
            positive_counts = self._counts(mini_batch.response_mask * positive_B[:, None])
        micro_batches = self._micro_batches(mini_batch)
        for position, indices in enumerate(micro_batches):
            micro = mini_batch[indices].trimmed().to(self.device)
            current = self._run(POLICY, micro, entropy_gradient=self.algorithm.entropy.active)
            old_BT = current.log_probs_BT.detach() if is_old else filled(micro.old_log_probs)
            tensors = {
                **named_tensors(micro),
                "log_probs_BT": current.log_probs_BT,
                "old_log_probs_BT": old_BT,
                "entropy_BT": current.entropy_BT,
                "top_log_probs_BTK": current.log_probs_BTK,
            }
            loss, values = self.algorithm.loss(
                tensors,
                kl_coefficient=self.kl_controller.coefficient,
                entropy_coefficient=self.entropy_controller.coefficient,
                counts=counts,
                positive_counts=positive_counts,
            )
            measured = self._updates > 1 and not self._ratio_to_rollout
            before_BT = old_BT if measured else current.log_probs_BT.detach()
            gap = (before_BT - micro.rollout_log_probs).abs()
            metrics.add_each({**values, "entropy": current.entropy_BT}, micro.response_mask)
            metrics.add({"rollout_gap": gap}, micro.response_mask, maximum=True)
            # DeepSpeed averages gradients over ranks, so the loss of a rank is scaled up by their number.
            metrics.add_sum("loss", loss.detach() / (self.trainer.world_size * self._updates))
            yield loss, position == len(micro_batches) - 1

    def _update_critic(self, mini_batch: Experience, metrics: TokenMetrics, *, last: bool) -> None:
        counts = self._counts(mini_batch.response_mask)
        if isinstance(self.critic, CriticPool):
            self.critic.learn(mini_batch, counts, last=last)
            return
        losses = self._value_objective.losses(
            mini_batch, self._micro_batches(mini_batch), self._values, counts, metrics, self.device
        )
        self.optimize(losses, CRITIC)

    def _adapt(self, experience: Experience, metrics: dict[str, float]) -> dict[str, float]:
        """The controllers take in what was measured; returns their coefficients and the critic's quality."""
        reduce, mask_BT = self._strategy.sum_over_ranks, experience.response_mask
        adapted: dict[str, float] = {}
        if self.algorithm.kl_is_in_reward:
            kl_B = sequence_means(
                self.algorithm.kl_to_reference(
                    filled(experience.old_log_probs), filled(experience.ref_log_probs), mask_BT
                ),
                mask_BT,
            )
            adapted |= mean_over_ranks({"train/kl": (kl_B, mask_BT.bool().any(dim=-1))}, reduce)
        kl = {**metrics, **adapted}.get("train/kl")
        if kl is not None:
            self.kl_controller.update(kl, experience.shape[0] * self.trainer.world_size)
            adapted["train/kl_coefficient"] = self.kl_controller.coefficient
        if self.algorithm.entropy.active and "train/entropy" in metrics:
            self.entropy_controller.update(metrics["train/entropy"])
            adapted["train/entropy_coefficient"] = self.entropy_controller.coefficient
        if self.critic is not None:
            adapted["train/critic/explained_variance"] = explained_variance(
                filled(experience.values), filled(experience.returns), mask_BT, reduce
            )
        return adapted

    # State ------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["stage"]["kl_controller"] = self.kl_controller.state_dict()
        checkpoint["stage"]["entropy_controller"] = self.entropy_controller.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_controller.load_state_dict(checkpoint["stage"]["kl_controller"])
        self.entropy_controller.load_state_dict(checkpoint["stage"]["entropy_controller"])
