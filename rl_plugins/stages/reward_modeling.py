"""Reward modelling: a model with a scalar head learns from pairs of responses or from labelled steps.

Axes: `B` examples (a pair is one), `R` samples (a pair has two), `T` response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate
from rl_plugins.algorithms.inputs import SCORED_PAIR_INPUTS, SCORED_STEP_INPUTS, call_with, check_inputs
from rl_plugins.algorithms.registry import named_function
from rl_plugins.algorithms.reward_model_losses import REWARD_MODEL_LOSSES, RewardModelLoss
from rl_plugins.data.experience import Experience
from rl_plugins.data.padding import pad_ragged
from rl_plugins.data.preferences import PairBatch
from rl_plugins.data.process_rewards import ProcessRewardBatch
from rl_plugins.device_copies import to_device
from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import options_for
from rl_plugins.models.lora import has_adapter
from rl_plugins.models.scalar_head import last_token_scores, load_scalar_head
from rl_plugins.stages.arguments import StageArguments
from rl_plugins.stages.metrics import TokenMetrics, mean_over_ranks
from rl_plugins.stages.micro_batches import Lengths
from rl_plugins.stages.optimizer import MicroBatchLoss
from rl_plugins.stages.stage import Stage
from rl_plugins.strategies.contract import REWARD_MODEL


class RewardModeling(Stage):
    """Minimizes a loss of `REWARD_MODEL_LOSSES`, averaged over the pairs (or labelled tokens) of the global batch.

    A loss of the scores of whole responses takes pairs (`PairBatch`). A loss of the scores of tokens takes labelled
    steps (`ProcessRewardBatch`).

    Args:
        model: see `Stage`. The body of a causal language model gets a new head. A model object has the forward of a
            token classification model with one label.
        loss: name in `REWARD_MODEL_LOSSES`, or a function.
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
        **stage: Unpack[StageArguments],
    ) -> None:
        super().__init__(model, **stage)
        self.loss_options = dict(loss_options or {})
        self.loss = named_function(REWARD_MODEL_LOSSES, loss, self.loss_options)
        self._validated: dict[str, list[Tensor]] = {}

    @override
    def load_model(self, path: str, frozen: str | None = None) -> nn.Module:
        with self.strategy.sharded_init(frozen):
            return load_scalar_head(path, dtype=self.model_dtype, **options_for(frozen, self.loading))

    @override
    def _trained_model(self) -> nn.Module:
        model = super()._trained_model()
        inner = model.get_base_model() if has_adapter(model) else model
        if type(inner).__name__.endswith("ForSequenceClassification"):
            raise ConfigError(
                f"{type(inner).__name__} scores the last token alone: save the model and pass its folder, or use "
                "AutoModelForTokenClassification with num_labels=1"
            )
        return model

    # The step ---------------------------------------------------------------------------------------------------

    @override
    def training_step(self, batch: PairBatch | ProcessRewardBatch, batch_idx: int) -> None:
        start = time.perf_counter()
        examples = self._examples(batch)
        self._metrics = TokenMetrics()
        with self.strategy.phase_log.measure("update_reward_model"):
            self.optimize(self._losses(examples))
        metrics = self._metrics.averages(self.strategy.ranks.sum, self.strategy.ranks.max)
        seconds = time.perf_counter() - start
        tokens = float(self.strategy.ranks.sum(examples.experience.sequence_lengths.sum().double()))
        self.end_step({**metrics, "time/step": seconds, "tokens_per_s": tokens / seconds})

    def _examples(self, batch: PairBatch | ProcessRewardBatch) -> Pairs | Steps:
        examples = labelled_examples(batch, self.tokenizer.pad_token_id)
        check_inputs(self.loss, self.loss_options, examples.given, f"a {type(batch).__name__}")
        return examples

    def _losses(self, examples: Pairs | Steps) -> Iterator[MicroBatchLoss]:
        all_indices = torch.arange(len(examples))
        total = self.strategy.ranks.sum(examples.label_mask(all_indices).sum().double())
        counts = GlobalCounts(float(total), float(total), self.trainer.world_size)
        micro_batches = self.passes.cutter.indices(examples.lengths)
        for position, indices in enumerate(micro_batches):
            losses, metrics, mask = self._evaluate(examples, indices)
            self._metrics.add({"loss": losses, **metrics}, mask)
            yield aggregate(losses, mask, "token-mean", counts), position == len(micro_batches) - 1

    def _evaluate(self, examples: Pairs | Steps, indices: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Return losses, metrics and the mask of counted losses of some examples: [B] for pairs, [B, T] for steps."""
        scores_RT = self._scores(examples.samples(indices))
        losses, metrics = call_with(self.loss, examples.loss_inputs(scores_RT, indices), self.loss_options)
        return losses, metrics, to_device(examples.label_mask(indices), losses.device)

    def _scores(self, samples: Experience) -> Tensor:
        return self.passes.scores(REWARD_MODEL, samples)

    # Validation -------------------------------------------------------------------------------------------------

    @override
    def on_validation_epoch_start(self) -> None:
        self._validated = {}

    @override
    def validation_step(self, batch: PairBatch | ProcessRewardBatch, batch_idx: int) -> None:
        examples = self._examples(batch)
        # Parameters gathered in inference mode cannot be trained afterwards.
        with self.strategy.phase_log.measure("validate"), torch.inference_mode(False), torch.no_grad():
            # The number of micro-batches is equal on all ranks. Some may be empty.
            for indices in self.passes.log_prob_cutter.indices(examples.lengths):
                if not len(indices):
                    # All ranks take part in every forward pass, also a rank without rows.
                    self._scores(examples.experience.placeholder(self.tokenizer.pad_token_id))
                    continue
                losses, metrics, mask = self._evaluate(examples, indices)
                for name, values in {"loss": losses, **metrics}.items():
                    self._validated.setdefault(name, []).append(values[mask.bool()].double().cpu())

    @override
    def on_validation_epoch_end(self) -> None:
        # A rank without rows has no names, and adds 0 to the sums.
        names = set.union(*self.strategy.ranks.gather(set(self._validated)))
        no_values = [torch.zeros(0, dtype=torch.float64)]
        columns = {name: torch.cat(self._validated.get(name, no_values)) for name in sorted(names)}
        counted = {name: (values, torch.ones_like(values).bool()) for name, values in columns.items()}
        metrics = mean_over_ranks(counted, self.strategy.ranks.sum)
        self.track_validation(metrics)


# Examples ------------------------------------------------------------------------------------------------------


class Pairs:
    """Pairs of responses to one prompt; both responses of a pair are always in the same micro-batch.

    Attributes:
        experience: all samples: the chosen responses, then the rejected responses.
    """

    given = SCORED_PAIR_INPUTS

    def __init__(self, batch: PairBatch, pad_token_id: int) -> None:
        """Pad the pairs."""
        self._count = len(batch.chosen_ids)
        self.experience = batch.samples(pad_token_id)
        self._margins_B = torch.tensor(batch.margins, dtype=torch.float32)

    @property
    def lengths(self) -> Lengths:
        """Lengths of the pairs."""
        return Lengths.of_examples(self.experience, self._both(torch.arange(self._count)).view(2, -1).T)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return self._count

    def samples(self, indices_B: Tensor) -> Experience:
        """Return the samples of some pairs: the chosen responses, then the rejected responses."""
        return self.experience[self._both(indices_B)].trimmed()

    def _both(self, indices_B: Tensor) -> Tensor:
        return torch.cat([indices_B, indices_B + self._count])

    def label_mask(self, indices_B: Tensor) -> Tensor:
        """Return the mask of counted pairs [B]: every pair counts."""
        return torch.ones(len(indices_B))

    def loss_inputs(self, scores_RT: Tensor, indices_B: Tensor) -> dict[str, Tensor]:
        """Return the loss inputs: scores of whole responses [B] and margins [B]."""
        lengths_R = to_device(self.experience.response_lengths[self._both(indices_B)], scores_RT.device)
        chosen_B, rejected_B = last_token_scores(scores_RT, lengths_R).chunk(2)
        margins_B = to_device(self._margins_B[indices_B].to(scores_RT.dtype), scores_RT.device)
        return {"chosen_scores_B": chosen_B, "rejected_scores_B": rejected_B, "margins_B": margins_B}


class Steps:
    """Responses with a label at the end of each step.

    Attributes:
        experience: all samples.
    """

    given = SCORED_STEP_INPUTS

    def __init__(self, batch: ProcessRewardBatch, pad_token_id: int) -> None:
        """Pad the responses and the labels."""
        self.experience = batch.samples(pad_token_id)
        self._labels_BT, _ = pad_ragged(batch.labels, value=float("nan"), dtype=torch.float32, side="right")

    @property
    def lengths(self) -> Lengths:
        """Lengths of the responses."""
        return Lengths.of(self.experience)

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self.experience)

    def samples(self, indices_B: Tensor) -> Experience:
        """Return the samples of some examples."""
        return self.experience[indices_B].trimmed()

    def label_mask(self, indices_B: Tensor) -> Tensor:
        """Return the mask of counted tokens [B, T]: labelled tokens count."""
        return (~self._labels(indices_B).isnan()).float()

    def loss_inputs(self, scores_RT: Tensor, indices_B: Tensor) -> dict[str, Tensor]:
        """Return the loss inputs: scores, labels and label mask of tokens [B, T]."""
        columns = {"labels_BT": self._labels(indices_B), "label_mask_BT": self.label_mask(indices_B)}
        moved = {name: to_device(column.to(scores_RT.dtype), scores_RT.device) for name, column in columns.items()}
        return {"scores_BT": scores_RT, **moved}

    def _labels(self, indices_B: Tensor) -> Tensor:
        return self._labels_BT[indices_B, : int(self.experience.response_lengths[indices_B].max())]


def labelled_examples(batch: object, pad_token_id: int) -> Pairs | Steps:
    """Return the examples of a batch.

    Raises:
        ConfigError: the batch holds neither pairs nor labelled steps.
    """
    if isinstance(batch, PairBatch):
        return Pairs(batch, pad_token_id)
    if isinstance(batch, ProcessRewardBatch):
        return Steps(batch, pad_token_id)
    raise ConfigError(
        f"a reward model learns from pairs or labelled steps, not from a {type(batch).__name__}: serve them with "
        "PreferenceDataModule(..., validate_on='responses') or ProcessRewardDataModule"
    )
