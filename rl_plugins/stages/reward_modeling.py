"""Reward modelling: a model with a scalar head learns which response is better, or which steps are right."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate
from rl_plugins.algorithms.injection import call_with, named_function, required_inputs
from rl_plugins.algorithms.reward_model_losses import REWARD_MODEL_LOSSES, RewardModelLoss
from rl_plugins.data.experience import Experience
from rl_plugins.data.preferences import PairBatch
from rl_plugins.data.process_rewards import ProcessRewardBatch
from rl_plugins.errors import ConfigError
from rl_plugins.models.scalar_head import load_scalar_head, response_scores
from rl_plugins.stages.labelled_examples import Pairs, Steps, labelled_examples, placeholder
from rl_plugins.stages.metrics import TokenMetrics, mean_over_ranks
from rl_plugins.stages.stage import Stage, StageOptions
from rl_plugins.strategies.contract import REWARD_MODEL


class RewardModeling(Stage):
    """Minimises a loss of `REWARD_MODEL_LOSSES`, averaged over the pairs (or labelled tokens) of the global batch.

    Which batches it takes follows from the loss: pairs (`PairBatch`) for one that asks for the scores of whole
    responses, steps (`ProcessRewardBatch`) for one that asks for those of tokens.

    Args:
        model: see `Stage`; of a causal language model the body is taken, and the head is new. A model that is given as
            such has the forward of a token classification model with one label.
        loss: name or function.
        loss_options: keyword arguments of the loss, such as `centering`.
        **stage: arguments of `Stage`.
    """

    trained = REWARD_MODEL

    def __init__(
        self,
        model: str | nn.Module,
        *,
        loss: str | RewardModelLoss = "bradley_terry",
        loss_options: Mapping[str, Any] | None = None,
        **stage: Unpack[StageOptions],
    ) -> None:
        super().__init__(model, **stage)
        self.loss_options = dict(loss_options or {})
        self.loss = named_function(REWARD_MODEL_LOSSES, loss, self.loss_options)
        self._validated: dict[str, list[Tensor]] = {}

    @override
    def load_model(self, path: str, frozen: str | None = None) -> nn.Module:
        with self.sharded_init(frozen):
            return load_scalar_head(path, dtype=self.model_dtype, gradient_checkpointing=self._gradient_checkpointing)

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: PairBatch | ProcessRewardBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        examples = self._examples(batch)
        self._metrics = TokenMetrics()
        with self._phase("update_reward_model"):
            self.optimize(self._losses(examples))
        metrics = self._metrics.averages(self._strategy.sum_over_ranks, self._strategy.max_over_ranks)
        seconds = time.perf_counter() - start
        tokens = float(self._strategy.sum_over_ranks(examples.tokens.double()))
        self.end_step({**metrics, "time/step": seconds, "tokens_per_s": tokens / seconds})

    def _examples(self, batch: PairBatch | ProcessRewardBatch) -> Pairs | Steps:
        examples = labelled_examples(batch, self.tokenizer.pad_token_id)
        missing = [name for name in required_inputs(self.loss, self.loss_options) if name not in examples.given]
        if missing:
            raise ConfigError(
                f"the loss {self.loss.__name__} needs {missing[0]}, which a {type(batch).__name__} does not have: it "
                f"gives {', '.join(sorted(examples.given))}. Choose the loss that fits the data"
            )
        return examples

    def _losses(self, examples: Pairs | Steps) -> Iterator[tuple[Tensor, bool]]:
        everything = torch.arange(len(examples))
        total = self._strategy.sum_over_ranks(examples.label_mask(everything).sum().double())
        counts = GlobalCounts(float(total), float(total), self.trainer.world_size)
        micro_batches = self.cutter.indices(examples.lengths)
        for position, indices in enumerate(micro_batches):
            losses, metrics, mask = self._evaluate(examples, indices)
            self._metrics.add({"loss": losses, **metrics}, mask)
            yield aggregate(losses, mask, "token-mean", counts), position == len(micro_batches) - 1

    def _evaluate(self, examples: Pairs | Steps, indices: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Losses and metrics of some examples, and which of them count: [B] of pairs, [B, T] of steps."""
        scores_RT = self._scores(examples.samples(indices))
        losses, metrics = call_with(self.loss, examples.loss_inputs(scores_RT, indices), self.loss_options)
        return losses, metrics, examples.label_mask(indices).to(losses.device)

    def _scores(self, samples: Experience) -> Tensor:
        inputs = self.forward_inputs(samples.to(self.device))
        return response_scores(self._strategy.engine(REWARD_MODEL), **inputs)

    # Validation -------------------------------------------------------------------------------------------------

    @override
    def on_validation_epoch_start(self) -> None:
        self._validated = {}

    @override
    def validation_step(self, batch: PairBatch | ProcessRewardBatch, batch_idx: int) -> None:
        examples = self._examples(batch)
        # Parameters that a sharded engine gathers in inference mode could not be trained afterwards.
        with self._phase("validate"), torch.inference_mode(False), torch.no_grad():
            # As many on every rank, though the ranks' rows may differ by one; some may be empty.
            for indices in self.cutter.indices(examples.lengths):
                if not len(indices):
                    # Ranks meet in every forward pass, also those that have no more rows.
                    self._scores(placeholder(self.tokenizer.pad_token_id))
                    continue
                losses, metrics, mask = self._evaluate(examples, indices)
                for name, values in {"loss": losses, **metrics}.items():
                    self._validated.setdefault(name, []).append(values[mask.bool()].double().cpu())

    @override
    def on_validation_epoch_end(self) -> None:
        # A rank without rows has no names, and its part in the sums is 0.
        everyones = self._strategy.gather(set(self._validated))
        nothing = [torch.zeros(0, dtype=torch.float64)]
        columns = {name: torch.cat(self._validated.get(name, nothing)) for name in sorted(set.union(*everyones))}
        counted = {name: (values, torch.ones_like(values).bool()) for name, values in columns.items()}
        metrics = mean_over_ranks(counted, self._strategy.sum_over_ranks)
        self.track({f"val/{name}": value for name, value in {**metrics, **self._strategy.phases.drain()}.items()})
