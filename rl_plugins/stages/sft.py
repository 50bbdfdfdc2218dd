"""Supervised fine-tuning: the log-likelihood of given responses, and validation by generation."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate, local_counts
from rl_plugins.data.experience import Experience
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.rollout.engine import SamplingConfig
from rl_plugins.stages.micro_batches import Lengths
from rl_plugins.stages.sampling import SamplingOptions, SamplingStage
from rl_plugins.strategies.contract import POLICY


class SFT(SamplingStage):
    """Maximises the log-likelihood of responses, averaged over the tokens of the global batch.

    Args:
        policy: see `Stage`.
        eval_sampling: see `SamplingStage`.
        **sampling_stage: arguments of `SamplingStage`.
    """

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        eval_sampling: SamplingConfig,
        **sampling_stage: Unpack[SamplingOptions],
    ) -> None:
        super().__init__(policy, eval_sampling=eval_sampling, **sampling_stage)

    @override
    def training_step(self, batch: dict[str, list[list[int]]], batch_idx: int) -> None:
        start = time.perf_counter()
        examples = Experience.from_responses(batch["prompt_ids"], batch["response_ids"], self.tokenizer.pad_token_id)
        with self._phase("update_policy"):
            self._loss = torch.zeros(())
            self.optimize(self._losses(examples))
        loss = float(self._strategy.sum_over_ranks(self._loss.double().cpu()))
        seconds = time.perf_counter() - start
        tokens = float(self._strategy.sum_over_ranks(examples.sequence_lengths.sum().double()))
        self.end_step({"train/loss": loss, "time/step": seconds, "tokens_per_s": tokens / seconds})

    def _losses(self, examples: Experience) -> Iterator[tuple[Tensor, bool]]:
        totals = self._strategy.sum_over_ranks(local_counts(examples.response_mask))
        counts = GlobalCounts(float(totals[0]), float(totals[1]), self.trainer.world_size)
        micro_batches = self.cutter.indices(Lengths.of(examples))
        for position, indices in enumerate(micro_batches):
            micro = examples[indices].trimmed().to(self.device)
            engine = self._strategy.engine(POLICY)
            log_probs_BT = response_log_probs(engine, **self.forward_inputs(micro)).log_probs_BT
            loss = aggregate(-log_probs_BT, micro.response_mask, "token-mean", counts)
            self._loss = self._loss + loss.detach().cpu() / self.trainer.world_size
            yield loss, position == len(micro_batches) - 1
