"""Critic: its objective, its measure, and its training in a separate process with whole weights.

A critic in the training workers is a model of the stage, like the policy. `CriticLearner` is a critic outside of them:
it computes values, is trained, and is saved. Several processes can hold the same critic and train on parts of a
mini-batch (data parallel). Each loss is divided by counts of the whole mini-batch. So the gradients of the processes
are summed, and the step is the same for any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.inputs import one_rank
from rl_plugins.algorithms.value_loss import value_loss
from rl_plugins.config.models import CriticConfig
from rl_plugins.data.experience import Experience, computed
from rl_plugins.device_copies import to_device
from rl_plugins.errors import CheckpointError
from rl_plugins.models.dropout import turn_off_dropout
from rl_plugins.models.finite import not_finite
from rl_plugins.models.loading import LoadingOptions
from rl_plugins.models.lora import with_adapter
from rl_plugins.models.packing import shares_prompts
from rl_plugins.models.scalar_head import load_scalar_head, position_scores, response_values
from rl_plugins.plain_file import load_plain, save_plain
from rl_plugins.stages.forward_passes import SequenceRows
from rl_plugins.stages.metrics import TokenMetrics
from rl_plugins.stages.micro_batches import Cutter, Lengths, PatchBudget
from rl_plugins.stages.optimizer import MicroBatchLoss, build_optimizer
from rl_plugins.strategies.contract import COST_CRITIC, CRITIC
from rl_plugins.strategies.loss_scale import LossScale
from rl_plugins.vision_language import with_frozen_tower

_FILE = "critic.pt"
FIELDS = {CRITIC: ("values", "returns"), COST_CRITIC: ("cost_values", "cost_returns")}
"""Fields of an `Experience` for each critic by name: the values of the critic, and the returns that it learns."""


@dataclass(frozen=True)
class ValueObjective:
    """Objective of a critic, in the training workers or in a pool.

    Attributes:
        clip: see `value_loss`.
        aggregation: see `aggregate`.
        scale_factor: see `aggregate`.
        updates: number of optimizer steps of an RL step; metrics are averaged over the optimizer steps.
        critic: name of the critic, for its fields and its metrics.
    """

    clip: float | None
    aggregation: str
    scale_factor: float | None
    updates: int
    critic: str = CRITIC

    def losses(
        self,
        mini_batch: Experience,
        micro_batches: Sequence[Tensor],
        values_of: Callable[[Experience], Tensor],
        counts: GlobalCounts,
        metrics: TokenMetrics,
        device: torch.device | str,
    ) -> Iterator[MicroBatchLoss]:
        """Yield the loss of each micro-batch, and True with the last micro-batch.

        Args:
            mini_batch: samples with the critic's values (from before the update) and returns.
            micro_batches: indices of the samples of each micro-batch.
            values_of: function from a micro-batch to the critic's values [B, T], with gradient.
            counts: global counts of the mini-batch of all ranks.
            metrics: collector to which the metrics of the loss are added.
            device: device of the critic.
        """
        values, returns = FIELDS[self.critic]
        for position, indices in enumerate(micro_batches):
            on_host = mini_batch[indices].trimmed()
            values_BT, micro = values_of(on_host), to_device(on_host, device)
            loss_BT, measured = value_loss(
                values_BT=values_BT,
                old_values_BT=computed(getattr(micro, values)),
                returns_BT=computed(getattr(micro, returns)),
                response_mask_BT=micro.response_mask,
                clip=self.clip,
            )
            loss = aggregate(loss_BT, micro.response_mask, self.aggregation, counts, scale_factor=self.scale_factor)
            metrics.add_each({f"{self.critic}/{name}": value for name, value in measured.items()}, micro.response_mask)
            metrics.add_sum(f"{self.critic}/loss", loss.detach() / (counts.ranks * self.updates))
            yield loss, position == len(micro_batches) - 1


def value_objective(algorithm: Algorithm, updates: int, critic: str) -> ValueObjective:
    """Return the objective of an algorithm's critic.

    Args:
        algorithm: algorithm of the policy.
        updates: number of optimizer steps of an RL step.
        critic: name of the critic.
    """
    return ValueObjective(algorithm.value_clip, algorithm.aggregation, algorithm.scale_factor, updates, critic)


def explained_variance(
    values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]
) -> float:
    """Return `1 - Var(returns - values) / Var(returns)` of the valid tokens of all ranks; NaN if all returns are equal.

    1 is a perfect critic. 0 is a critic no better than a constant. Collective.
    """
    valid_BT = mask_BT.bool()
    returns_N, errors_N = returns_BT[valid_BT].double(), (returns_BT - values_BT)[valid_BT].double()
    sums = [returns_N.new_tensor(len(returns_N))]
    for column_N in (returns_N, errors_N):
        sums += [column_N.sum(), column_N.square().sum()]
    count, total, squares, error, squared_errors = sum_over_ranks(torch.stack(sums)).tolist()
    variance = squares - total * total / max(count, 1)
    if variance <= 1e-12 * squares:
        return float("nan")
    return 1 - (squared_errors - error * error / max(count, 1)) / variance


@dataclass(frozen=True)
class CriticTraining:
    """Model and settings of a critic's training.

    Attributes:
        path: folder or name of the initial model.
        config: settings of the critic.
        gradient_clip: bound on the gradient's norm; 0 for none.
        objective: objective of the critic.
        computes_in: dtype of forward and backward passes; weights are held at least in float32.
        loading: options for loading the model.
        tokens_per_micro_batch: see `Cutter`.
        packing: see `Cutter`.
        seed: seed of an adapter's initial weights.
        patches_per_micro_batch: patches of the images of one forward pass; None for no bound.
    """

    path: str
    config: CriticConfig
    gradient_clip: float
    objective: ValueObjective
    computes_in: torch.dtype
    loading: LoadingOptions
    tokens_per_micro_batch: int
    packing: bool
    seed: int
    patches_per_micro_batch: int | None = None


@dataclass(frozen=True)
class Learnt:
    """Result of an update.

    Attributes:
        metrics: metrics of the rows of one process.
        gradient_norm: norm of the whole gradient before clipping; None after an overflow of float16.
        lr: learning rate of the update.
        loss_scale: scale of the loss after the update; None without float16.
    """

    metrics: TokenMetrics
    gradient_norm: float | None
    lr: float
    loss_scale: LossScale | None


class CriticLearner:
    """The critic with its optimizer and schedule, alone or as one of the ranks of the default process group.

    Args:
        training: model and settings of the critic's training.
        device: device of the critic.
    """

    def __init__(self, training: CriticTraining, device: str = "cpu") -> None:
        self._training, self._device = training, device
        self._is_low = training.computes_in in (torch.bfloat16, torch.float16)
        torch.manual_seed(training.seed)
        model: Any = load_scalar_head(
            training.path,
            dtype=torch.float32 if self._is_low else training.computes_in,
            **training.loading,
        )
        self._model = with_frozen_tower(with_adapter(model, training.config.lora), training.config.optimizer.vision_lr)
        turn_off_dropout(self._model)
        self._model.to(device)
        self._trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        # One tensor for all gradients, so an update needs one collective.
        self._gradients = torch.zeros(sum(p.numel() for p in self._trained.values()), dtype=model.dtype, device=device)
        for parameter, part in zip(
            self._trained.values(), self._gradients.split([p.numel() for p in self._trained.values()]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        configured = build_optimizer(training.config.optimizer, self._model)
        self._optimizer, self._schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        self._loss_scale = LossScale() if training.computes_in == torch.float16 else None
        self._ranks = 1
        if torch.distributed.is_initialized():
            self._ranks = torch.distributed.get_world_size()
            for parameter in self._trained.values():
                torch.distributed.broadcast(parameter.data, src=0)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Trained weights by name."""
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    @torch.no_grad()
    def scores(self, rows: dict[str, Tensor], **options: Any) -> Tensor:
        """Return `position_scores` of `rows`."""
        self._model.eval()
        with self._precision():
            inputs: dict[str, Any] = {**rows, **options}
            return position_scores(self._model, **inputs, device=torch.device(self._device)).cpu()

    def update(self, parts: Sequence[Experience], counts: GlobalCounts, *, last: bool) -> Learnt:
        """Take one optimizer step on a mini-batch, of which this process has some rows. Collective.

        Args:
            parts: rows of this process, possibly none.
            counts: global counts of the mini-batch of all processes, with `ranks` 1.
            last: True for the last mini-batch of a step; the learning rate schedule then advances.
        """
        training, scale, metrics = self._training, self._loss_scale, TokenMetrics()
        mini_batch = Experience.concat(parts)
        self._model.train()
        if len(mini_batch):
            shared = training.packing and shares_prompts(self._model)
            budget = PatchBudget.of(training.patches_per_micro_batch, self._model)
            cutter = Cutter(training.tokens_per_micro_batch, training.packing, shared, one_rank, budget)
            indices = cutter.indices(Lengths.of(mini_batch))
            for loss, _ in training.objective.losses(mini_batch, indices, self._values, counts, metrics, self._device):
                (loss if scale is None else scale.scaled(loss)).backward()
        if self._ranks > 1:
            torch.distributed.all_reduce(self._gradients)
        if scale is not None:
            scale.unscale([self._gradients])
        norm = float(nn.utils.clip_grad_norm_(list(self._trained.values()), training.gradient_clip or float("inf")))
        rate = float(self._optimizer.param_groups[0]["lr"])
        known_norm = norm if scale is None else scale.known_norm(norm)
        if scale is None or scale.update(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        if last:
            self._schedule.step()
        measured = TokenMetrics()
        measured.take_in(metrics)
        return Learnt(measured, known_norm, rate, None if scale is None else replace(scale))

    def has_finite_weights(self) -> bool:
        """Return True if no trained weight is NaN or infinite."""
        return not not_finite(self.weights.items())

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and scale of the loss to `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "weights": self.weights,
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }
        if self._loss_scale is not None:
            state["loss_scale"] = asdict(self._loss_scale)
        save_plain(state, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Restore the state of `save` from `folder`.

        Raises:
            CheckpointError: the folder has no such file, or the file belongs to another critic.
        """
        file = folder / _FILE
        if not file.is_file():
            raise CheckpointError(
                f"{folder} holds no critic that was trained on a pool of its own: if the critic was trained in the "
                "workers, give the stage no CriticPool (in a recipe: placement.critic.actors=0); if the checkpoint no "
                "longer keeps its critic (keep_models of PolicyCheckpoint, in a recipe: critic.keep_checkpoints), "
                "resume from a newer checkpoint"
            )
        state = load_plain(file, device=self._device)
        shapes, saved_shapes = (
            {name: tuple(weight.shape) for name, weight in weights.items()}
            for weights in (self.weights, state["weights"])
        )
        if shapes != saved_shapes:
            odd = sorted(set(shapes.items()) ^ set(saved_shapes.items()))[0][0]
            raise CheckpointError(f"{file} is not of this critic: {odd} is missing or has another shape")
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        if self._loss_scale is not None and "loss_scale" in state:
            self._loss_scale = LossScale(**state["loss_scale"])

    def _values(self, micro: Experience) -> Tensor:
        rows = SequenceRows.of(micro)
        with self._precision():
            inputs: dict[str, Any] = {**rows.samples.forward_inputs, "packed": self._training.packing}
            values_RW = response_values(self._model, **inputs, device=torch.device(self._device))
        return rows.fold(values_RW)

    def _precision(self) -> AbstractContextManager[Any]:
        device_type = torch.device(self._device).type
        return torch.autocast(device_type, dtype=self._training.computes_in, enabled=self._is_low)
