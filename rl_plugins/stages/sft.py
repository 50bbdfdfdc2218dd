"""Supervised fine-tuning: the log-likelihood of given responses; validation by generation, or by the same loss."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.aggregation import aggregate
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.experience import Experience
from rl_plugins.data.images import IMAGE_INPUTS
from rl_plugins.data.prompts import foreign_batch
from rl_plugins.device_copies import to_device
from rl_plugins.models.export import add_ends
from rl_plugins.rewards.inline import Reward
from rl_plugins.stages.arguments import StageArguments
from rl_plugins.stages.optimizer import MicroBatchLoss
from rl_plugins.stages.own_module import check_max_tokens
from rl_plugins.stages.sampling import AnyEnvironment, Scorer, setup_of_validation
from rl_plugins.stages.stage import Stage
from rl_plugins.strategies.contract import POLICY


class SFT(Stage):
    """Maximises the log-likelihood of responses, averaged over the tokens of the global batch.

    Of a conversation, the tokens of the policy count. Validation rows with responses give `val/loss`.

    Args:
        policy: see `Stage`.
        scorer: scores responses in validation. A reward function, or its configuration, gets `default_scorer`. None
            without validation.
        eval_sampling: sampling settings of validation; None without validation.
        environment: tools, or bounds on conversations if the scorer answers the policy; by default the policy answers
            once.
        seed: seed of sampling in validation.
        **stage: arguments of `Stage`.
    """

    policy: Any

    def __init__(
        self,
        policy: str | nn.Module,
        *,
        scorer: Scorer | Reward | None = None,
        eval_sampling: SamplingConfig | None = None,
        environment: AnyEnvironment | None = None,
        seed: int = 0,
        **stage: Unpack[StageArguments],
    ) -> None:
        super().__init__(policy, **stage)
        check_max_tokens(policy, eval_sampling)
        self.sampling_setup = setup_of_validation(scorer, self.tokenizer, eval_sampling, environment, seed)

    @override
    def training_step(self, batch: dict[str, list[Any]], batch_idx: int) -> None:
        start = time.perf_counter()
        examples = self._examples(batch)
        with self.strategy.phase_log.measure("update_policy"):
            self._loss = torch.zeros(())
            self.optimize(self._losses(examples))
        loss = float(self.strategy.ranks.sum(self._loss.double().cpu()))
        seconds = time.perf_counter() - start
        tokens = float(self.strategy.ranks.sum(examples.sequence_lengths.sum().double()))
        self.end_step({"train/loss": loss, "time/step": seconds, "tokens_per_s": tokens / seconds})

    def _examples(self, batch: dict[str, list[Any]]) -> Experience:
        if not isinstance(batch, dict) or not {"prompt_ids", "response_ids"} <= batch.keys():
            raise foreign_batch(batch, "SFTDataModule")
        return Experience.from_responses(
            batch["prompt_ids"],
            batch["response_ids"],
            self.tokenizer.pad_token_id,
            response_masks=batch.get("response_masks"),
            image_inputs=batch.get(IMAGE_INPUTS),
        )

    def _losses(self, examples: Experience) -> Iterator[MicroBatchLoss]:
        counts = self.passes.counts(examples.response_mask)
        micro_batches = self.passes.micro_batches(examples)
        for position, indices in enumerate(micro_batches):
            log_probs_BT, mask_BT = self._log_probs(examples, indices)
            loss = aggregate(-log_probs_BT, mask_BT, "token-mean", counts)
            self._loss = self._loss + loss.detach() / self.strategy.ranks.world_size
            yield loss, position == len(micro_batches) - 1

    def _log_probs(self, examples: Experience, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of a micro-batch, and the mask of tokens to learn, [B, T]."""
        if len(indices):
            micro = examples[indices].trimmed()
        else:
            # All ranks take part in every forward pass, also a rank with fewer samples.
            micro = examples.placeholder(self.tokenizer.pad_token_id)
            micro.response_mask = torch.zeros_like(micro.response_mask)
        log_probs_BT = self.passes.log_probs(POLICY, micro, entropy=False).log_probs_BT
        return log_probs_BT, to_device(micro.response_mask, self.passes.device)

    @override
    def export(self, folder: str | Path, *, adapter: bool = False) -> None:
        if self._strategy_of_parts is not None:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            # Conversations may teach another end than the end of the sequence.
            add_ends(self.policy, sorted(getattr(data, "further_ends", ())))
        super().export(folder, adapter=adapter)

    # Validation -------------------------------------------------------------------------------------------------

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        # Sum of the losses of tokens, and number of tokens; None without rows with responses.
        self._validated: Tensor | None = None

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not isinstance(batch, dict):
            super().validation_step(batch, batch_idx)
            return
        examples = self._examples(batch)
        sums = torch.zeros(2, dtype=torch.float64) if self._validated is None else self._validated
        # Parameters gathered in inference mode cannot be trained afterwards.
        with self.strategy.phase_log.measure("validate"), torch.inference_mode(False), torch.no_grad():
            for indices in self.passes.log_prob_batches(examples):
                log_probs_BT, mask_BT = self._log_probs(examples, indices)
                # Tokens without a mask may have log-probs of -inf.
                losses_BT = torch.where(mask_BT.bool(), -log_probs_BT, 0).double()
                sums = sums + torch.stack([losses_BT.sum(), mask_BT.double().sum()]).cpu()
        self._validated = sums

    @override
    def on_validation_epoch_end(self) -> None:
        if self._validated is None:
            super().on_validation_epoch_end()
            return
        total, tokens = self.strategy.ranks.sum(self._validated).tolist()
        self.track_validation({"loss": total / tokens})
