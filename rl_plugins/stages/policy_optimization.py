"""Policy optimization: sample, score, compute advantages, update. One RL step is one Lightning batch.

Every rank trains on the samples of its own prompts; what crosses ranks are a few sums. The algorithm is an `Algorithm`;
the strategy owns the models, the rollout engine and the memory; the scorer scores.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.aggregation import GlobalCounts, local_counts
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.masked import group_statistics
from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError
from rl_plugins.models.log_probs import ResponseLogProbs, response_log_probs
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.stages.metrics import TokenMetrics, mean_over_ranks
from rl_plugins.stages.micro_batches import micro_batch_indices
from rl_plugins.stages.sampling import SamplingOptions, SamplingStage, greedy
from rl_plugins.strategies.contract import POLICY

REFERENCE = "reference"


class PolicyOptimization(SamplingStage):
    """GRPO and its kin.

    Args:
        policy: see `Stage`.
        sampling: how training samples are drawn; `num_samples` is the group size. Stop tokens: see `SamplingStage`.
        algorithm: GRPO by default.
        eval_sampling: how `validate` samples; greedy with the same length by default.
        reference: name or folder of the reference model; needed with a KL coefficient, the policy's own by default.
        updates_per_step: optimizer steps per RL step; the prompts of a step are dealt over them.
        tokens_per_micro_batch: padded tokens of one forward and backward pass on one rank.
        **sampling_stage: arguments of `SamplingStage`.
    """

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        sampling: SamplingConfig,
        algorithm: Algorithm | None = None,
        eval_sampling: SamplingConfig | None = None,
        reference: str | None = None,
        updates_per_step: int = 1,
        tokens_per_micro_batch: int = 16_384,
        **sampling_stage: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(policy, eval_sampling=eval_sampling or greedy(sampling), **sampling_stage)
        self.algorithm = algorithm or Algorithm()
        self.sampling = self.ending(sampling)
        self.updates_per_step, self.tokens_per_micro_batch = updates_per_step, tokens_per_micro_batch
        self.reference: Any = None
        self.kl_controller = self.algorithm.kl.controller()
        self._reference_path = reference or (policy if isinstance(policy, str) else None)
        if self.algorithm.needs_reference and self._reference_path is None:
            raise ConfigError("algorithm.kl.coefficient is not 0: name the reference model with reference=...")

    @override
    def configure_model(self) -> None:
        super().configure_model()
        if self.algorithm.needs_reference and self.reference is None:
            assert self._reference_path is not None
            self.reference = self.load_model(self._reference_path)

    @override
    def engine_modules(self) -> dict[str, nn.Module]:
        modules = super().engine_modules()
        if self.reference is not None:
            modules[REFERENCE] = self.reference
        return modules

    # One RL step ------------------------------------------------------------------------------------------------

    @override
    def training_step(self, prompts: PromptBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        experience = self.collect(prompts)
        metrics = self.update(experience)
        self.end_step({**metrics, **self._throughput(experience, time.perf_counter() - start)})

    def collect(self, prompts: PromptBatch) -> Experience:
        """Sample, score, and compute log-probs and advantages, all on this rank's prompts."""
        experience = self.sample(prompts, self.sampling, self._seeds(prompts))
        self.score(experience)
        self.compute_log_probs(experience)
        self.compute_advantages(experience)
        return experience

    def update(self, experience: Experience) -> dict[str, float]:
        """Optimizer steps on the experience; returns the metrics of the step, averaged over all ranks."""
        tokens = TokenMetrics()
        with self._phase("update_policy"):
            for mini_batch in self._mini_batches(experience):
                self.optimize(self._losses(mini_batch, tokens))
        metrics = tokens.averages(self._strategy.sum_over_ranks, self._strategy.max_over_ranks)
        if "train/kl" in metrics:
            self.kl_controller.update(metrics["train/kl"], experience.shape[0] * self.trainer.world_size)
            metrics["train/kl_coefficient"] = self.kl_controller.coefficient
        return {**self._sample_metrics(experience, "train"), **metrics}

    # Collecting -------------------------------------------------------------------------------------------------

    def compute_log_probs(self, experience: Experience) -> None:
        """Fill `old_log_probs` where the update needs them before it begins, and `ref_log_probs`."""
        in_reward = self.algorithm.kl.placement == "reward" and self.algorithm.needs_reference
        if self.updates_per_step > 1 or in_reward:
            with self._phase("old_log_probs"):
                experience.old_log_probs = self._forward_only(POLICY, experience)
        if self.algorithm.needs_reference:
            with self._phase("ref_log_probs"):
                experience.ref_log_probs = self._forward_only(REFERENCE, experience)

    def compute_advantages(self, experience: Experience) -> None:
        """Fill `token_level_rewards`, `advantages` and `returns`."""
        with self._phase("advantages"):
            experience.token_level_rewards, experience.advantages, experience.returns = self.algorithm.advantages(
                scores_B=filled(experience.scores),
                response_mask_BT=experience.response_mask,
                response_lengths_B=experience.response_lengths,
                groups_B=experience.groups,
                valid_B=experience.valid,
                old_log_probs_BT=experience.old_log_probs,
                ref_log_probs_BT=experience.ref_log_probs,
                kl_coefficient=self.kl_controller.coefficient,
                sum_over_ranks=self._strategy.sum_over_ranks,
            )

    @torch.no_grad()
    def _forward_only(self, name: str, experience: Experience) -> Tensor:
        dtype = torch.promote_types(self.model_dtype, torch.float32)
        log_probs_BT = torch.zeros_like(experience.rollout_log_probs, dtype=dtype)
        for indices in self._micro_batches(experience):
            micro = experience[indices].trimmed().to(self.device)
            width = micro.responses.shape[1]
            log_probs_BT[indices, :width] = self._run(name, micro).log_probs_BT.to(log_probs_BT)
        return log_probs_BT

    def _run(self, name: str, batch: Experience) -> ResponseLogProbs:
        return response_log_probs(
            self._strategy.engine(name),
            input_ids_BS=batch.input_ids,
            attention_mask_BS=batch.attention_mask,
            position_ids_BS=batch.position_ids,
            response_width=batch.responses.shape[1],
            temperature=self.sampling.temperature or 1.0,
        )

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
        yield from experience.chunk(self.updates_per_step)

    def _micro_batches(self, experience: Experience) -> list[Tensor]:
        return micro_batch_indices(
            experience.prompt_lengths,
            experience.response_lengths,
            self.tokens_per_micro_batch,
            self._strategy.max_over_ranks,
        )

    def _losses(self, mini_batch: Experience, metrics: TokenMetrics) -> Iterator[tuple[Tensor, bool]]:
        totals = self._strategy.sum_over_ranks(local_counts(mini_batch.response_mask))
        counts = GlobalCounts(float(totals[0]), float(totals[1]), self.trainer.world_size)
        micro_batches = self._micro_batches(mini_batch)
        for position, indices in enumerate(micro_batches):
            micro = mini_batch[indices].trimmed().to(self.device)
            current = self._run(POLICY, micro)
            # With one update the policy that sampled is the one that is updated: the ratio is 1 by construction.
            on_policy = self.updates_per_step == 1
            old = current.log_probs_BT.detach() if on_policy else filled(micro.old_log_probs)
            loss, per_token = self.algorithm.loss(
                log_probs_BT=current.log_probs_BT,
                old_log_probs_BT=old,
                advantages_BT=filled(micro.advantages),
                response_mask_BT=micro.response_mask,
                ref_log_probs_BT=micro.ref_log_probs,
                kl_coefficient=self.kl_controller.coefficient,
                counts=counts,
            )
            gap = (old - micro.rollout_log_probs).abs()
            metrics.add({**per_token, "entropy": current.entropy_BT}, micro.response_mask)
            metrics.add({"rollout_gap": gap}, micro.response_mask, maximum=True)
            # DeepSpeed averages gradients over ranks, so the loss of a rank is scaled up by their number.
            metrics.add_sum("loss", loss.detach() / (self.trainer.world_size * self.updates_per_step))
            yield loss, position == len(micro_batches) - 1

    # Metrics ----------------------------------------------------------------------------------------------------

    def _sample_metrics(self, experience: Experience, prefix: str) -> dict[str, float]:
        valid = experience.valid
        lengths = experience.response_lengths.double()
        truncated = torch.tensor([reason == "length" for reason in experience.columns["finish_reason"]])
        scores = filled(experience.scores).double()
        groups = group_statistics(scores, experience.groups, valid)
        columns = {
            "reward": (scores, valid),
            "response_length": (lengths, torch.ones_like(valid)),
            "truncated": (truncated.double(), torch.ones_like(valid)),
            # Groups whose samples all scored alike teach nothing.
            "uniform_groups": ((groups.std_B == 0).double(), valid),
        }
        metrics = mean_over_ranks(columns, self._strategy.sum_over_ranks)
        kinds = ("raised", "timeout", "not_finite", "died")
        failures = self._strategy.sum_over_ranks(torch.tensor([float(self._failures.get(k, 0)) for k in kinds]))
        metrics |= {f"reward_{kind}": float(count) for kind, count in zip(kinds, failures, strict=True)}
        return {f"{prefix}/{name}": value for name, value in metrics.items()}

    def _throughput(self, experience: Experience, seconds: float) -> dict[str, float]:
        mine = torch.tensor([float(experience.shape[0]), float(experience.sequence_lengths.sum())])
        samples, tokens = self._strategy.sum_over_ranks(mine).tolist()
        return {"time/step": seconds, "samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds}

    # State ------------------------------------------------------------------------------------------------------

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["stage"]["kl_controller"] = self.kl_controller.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_controller.load_state_dict(checkpoint["stage"]["kl_controller"])


def filled(field: Tensor | None) -> Tensor:
    """A field of the experience that an earlier part of the step has computed."""
    assert field is not None, "the parts of the step ran out of order"
    return field
