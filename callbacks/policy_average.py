"""A moving average of the policy's weights, which is often the better policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.stages.stage import Stage, clock


class PolicyAverage(Callback):
    """Keeps an exponential moving average of what a stage trains, in float32, each rank of its own shards.

    Validation runs with the average; training never sees it. It is in the checkpoints of `PolicyCheckpoint`, which must
    stand behind it, and goes on from there among as many ranks as have saved it; otherwise it begins anew.

    Args:
        keep: share that a step keeps, such as 0.99: the average then covers about 100 steps.
    """

    def __init__(self, *, keep: float) -> None:
        if not 0 < keep < 1:
            raise ConfigError(f"average.keep={keep}: must be above 0 and below 1")
        self._keep = keep
        self._average: dict[str, Tensor] = {}
        self._aside: dict[str, Tensor] = {}
        self._clock = -1

    @override
    @torch.no_grad()
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = clock(pl_module)
        self._average = {name: shard.float().clone() for name, shard in _trained_shards(trainer)}

    @override
    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        before, self._clock = self._clock, clock(pl_module)
        # A run that was rolled back comes by its checkpoint's step again, which is in the average.
        if self._clock > before:
            for name, shard in _trained_shards(trainer):
                self._average[name].lerp_(shard.float(), 1 - self._keep)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _validates_in_training(trainer):
            self._put_in(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _validates_in_training(trainer):
            self._take_out(trainer)

    @contextmanager
    def in_place(self, trainer: Trainer) -> Iterator[None]:
        """The engine has the average for its weights: to export or validate it after training. Collective."""
        self._put_in(trainer)
        try:
            yield
        finally:
            self._take_out(trainer)

    @torch.no_grad()
    def _put_in(self, trainer: Trainer) -> None:
        for name, shard in _trained_shards(trainer):
            self._aside[name] = shard.clone()
            shard.copy_(self._average[name])
        _strategy(trainer).weights_changed()

    @torch.no_grad()
    def _take_out(self, trainer: Trainer) -> None:
        for name, shard in _trained_shards(trainer):
            shard.copy_(self._aside.pop(name))
        _strategy(trainer).weights_changed()

    def rank_state(self) -> dict[str, Tensor]:
        """This rank's part of the average."""
        return {name: tensor.cpu() for name, tensor in self._average.items()}

    def load_rank_state(self, state: dict[str, Tensor]) -> str:
        """Go on from `rank_state` where the shards are the same; says whether they are."""
        shapes = {name: tensor.shape for name, tensor in self._average.items()}
        if shapes != {name: tensor.shape for name, tensor in state.items()}:
            return "the average begins anew (other shards)"
        for name, tensor in state.items():
            self._average[name].copy_(tensor)
        return "average"


def read_average(checkpoint: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """The whole average that a checkpoint holds, in float32, in this process alone; nothing of a run without one.

    Args:
        checkpoint: its folder, with the states of callbacks on every rank.
        shapes: of the whole parameters.

    Raises:
        ConfigError: the run had cut its blocks over ranks (tensor parallelism).
    """
    files = sorted(checkpoint.glob("callbacks_*.pt"), key=lambda file: int(file.stem.removeprefix("callbacks_")))
    states = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]
    ranks = [state[PolicyAverage.__name__] for state in states if PolicyAverage.__name__ in state]
    names = [name for name in ranks[0] if name in shapes] if ranks else []
    if any(ranks[0][name].dim() > 1 and ranks[0][name].shape[1:] != shapes[name][1:] for name in names):
        raise ConfigError(
            f"the average in {checkpoint} is of a run with strategy.tensor_parallel, whose parts are not put together "
            "here: resume the run (run.resume=true) and let it end, its policy/ folder has its average"
        )
    return {name: _whole([rank[name] for rank in ranks], shapes[name]) for name in names}


def _whole(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """A parameter of what each rank has of it: all, its next rows, or its next numbers, padded behind the last."""
    if parts[0].shape == shape:
        return parts[0]
    return torch.cat([part.flatten() for part in parts])[: shape.numel()].view(shape)


def _trained_shards(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    stage: Any = trainer.lightning_module
    assert isinstance(stage, Stage)
    model = stage.engine_modules()[stage.trained]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, shard in _strategy(trainer).shards(stage.trained):
        if name in trained:
            yield name, shard


def _strategy(trainer: Trainer) -> Any:
    return trainer.strategy


def _validates_in_training(trainer: Trainer) -> bool:
    # Lightning's check before training comes before there is an average.
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
