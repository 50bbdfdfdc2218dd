"""A critic in a process of its own, whole: it gives values, learns, and is saved.

Several processes may hold the same critic and learn from parts of a mini-batch (data parallel). Each loss is divided by
counts of the whole mini-batch, so their gradients are added up, and the step is the same for any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_plugins.algorithms.aggregation import GlobalCounts
from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import add_adapter
from rl_plugins.models.packing import shares_prompts
from rl_plugins.models.scalar_head import load_scalar_head, position_scores, response_values
from rl_plugins.stages.critic import CriticConfig, ValueObjective
from rl_plugins.stages.metrics import TokenMetrics
from rl_plugins.stages.micro_batches import Cutter, Lengths

_FILE = "critic.pt"


@dataclass(frozen=True)
class CriticTraining:
    """Which critic is trained, and how.

    Attributes:
        path: what it starts from.
        config: its settings.
        gradient_clip: bound on the gradient's norm; 0 for none.
        objective: what it learns by.
        computes_in: the dtype of passes; weights are held in float32 at least.
        gradient_checkpointing: recompute activations in the backward pass.
        tokens_per_micro_batch: see `Cutter`.
        packing: see `Cutter`.
        seed: of an adapter's start, and of dropout.
    """

    path: str
    config: CriticConfig
    gradient_clip: float
    objective: ValueObjective
    computes_in: torch.dtype
    gradient_checkpointing: bool
    tokens_per_micro_batch: int
    packing: bool
    seed: int


@dataclass(frozen=True)
class Learnt:
    """What an update has shown.

    Attributes:
        metrics: of the rows of one process.
        gradient_norm: of the whole gradient, before clipping.
        lr: the rate of the update.
    """

    metrics: TokenMetrics
    gradient_norm: float
    lr: float


class CriticLearner:
    """The critic with its optimizer and schedule, alone or as one of the ranks of the default process group.

    Args:
        training: what it is.
        device: where it computes.
    """

    def __init__(self, training: CriticTraining, device: str = "cpu") -> None:
        self._training, self._device = training, device
        self._is_low = training.computes_in in (torch.bfloat16, torch.float16)
        torch.manual_seed(training.seed)
        model: Any = load_scalar_head(
            training.path,
            dtype=torch.float32 if self._is_low else training.computes_in,
            gradient_checkpointing=training.gradient_checkpointing,
        )
        lora = training.config.lora
        self._model: nn.Module = (model if lora is None else add_adapter(model, lora)).to(device)
        self._trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        # One tensor, so that processes talk once in an update.
        self._gradients = torch.zeros(sum(p.numel() for p in self._trained.values()), dtype=model.dtype, device=device)
        for parameter, part in zip(
            self._trained.values(), self._gradients.split([p.numel() for p in self._trained.values()]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        made = training.config.optimizer.adamw(self._trained.values())
        self._optimizer, self._schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        self._updates = 0
        self._rank, self._ranks = 0, 1
        if torch.distributed.is_initialized():
            self._rank, self._ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
            for parameter in self._trained.values():
                torch.distributed.broadcast(parameter.data, src=0)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Those that are trained, by name."""
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    @torch.no_grad()
    def scores(self, rows: dict[str, Tensor], **options: Any) -> Tensor:
        """`position_scores` of some rows."""
        self._model.eval()
        with self._precision():
            inputs: dict[str, Any] = {name: tensor.to(self._device) for name, tensor in rows.items()}
            return position_scores(self._model, **inputs, **options).cpu()

    def update(self, parts: Sequence[Experience], counts: GlobalCounts, *, last: bool) -> Learnt:
        """One optimizer step on a mini-batch, of which this process has some rows. Collective.

        Args:
            parts: those rows; all of them together may be none.
            counts: of the mini-batch of all processes, as of one rank.
            last: it is the last of a step, after which the schedule goes on.
        """
        training, metrics = self._training, TokenMetrics()
        mini_batch = Experience.concat(parts)
        self._model.train()
        # Dropout, where there is some, is the same when a run goes on.
        torch.manual_seed(training.seed + self._updates * self._ranks + self._rank)
        if len(mini_batch):
            together = training.packing and shares_prompts(self._model)
            cutter = Cutter(training.tokens_per_micro_batch, training.packing, together, _alone)
            indices = cutter.indices(Lengths.of(mini_batch))
            for loss, _ in training.objective.losses(mini_batch, indices, self._values, counts, metrics, self._device):
                loss.backward()
        if self._ranks > 1:
            torch.distributed.all_reduce(self._gradients)
        norm = nn.utils.clip_grad_norm_(list(self._trained.values()), training.gradient_clip or float("inf"))
        rate = float(self._optimizer.param_groups[0]["lr"])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        self._updates += 1
        if last:
            self._schedule.step()
        measured = TokenMetrics()
        measured.take_in(metrics)
        return Learnt(measured, float(norm), rate)

    def save(self, folder: Path) -> None:
        """Write what `load` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "weights": self.weights,
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "updates": self._updates,
        }
        torch.save(state, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Go on from what `save` has written.

        Raises:
            ConfigError: there is no such file, or it is of another critic.
        """
        file = folder / _FILE
        if not file.is_file():
            raise ConfigError(
                f"{folder} holds no critic that was trained on a pool of its own: one that was trained in the workers "
                "goes on there (placement.critic.actors=0), and one that is no longer kept (critic.keep_checkpoints) "
                "is in a newer checkpoint"
            )
        state = torch.load(file, map_location=self._device, weights_only=True)
        ours, theirs = ({name: tuple(w.shape) for name, w in some.items()} for some in (self.weights, state["weights"]))
        if ours != theirs:
            odd = sorted(set(ours.items()) ^ set(theirs.items()))[0][0]
            raise ConfigError(f"{file} is not of this critic: {odd} is missing or has another shape")
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        self._updates = state["updates"]

    def _values(self, micro: Experience) -> Tensor:
        with self._precision():
            return response_values(
                self._model,
                input_ids_BS=micro.input_ids,
                attention_mask_BS=micro.attention_mask,
                position_ids_BS=micro.position_ids,
                response_width=micro.responses.shape[1],
                packed=self._training.packing,
            )

    def _precision(self) -> AbstractContextManager[Any]:
        device_type = torch.device(self._device).type
        return torch.autocast(device_type, dtype=self._training.computes_in, enabled=self._is_low)


def _alone(values: Tensor) -> Tensor:
    return values
