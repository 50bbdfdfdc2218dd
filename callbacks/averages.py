"""Models behind the policy: a moving average of the policy's weights, and updates of the reference model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from rl_plugins.config.models import ReferenceConfig
from rl_plugins.config.settings import ABOVE_0_TO_BELOW_1, AT_LEAST_1, check_ranges
from rl_plugins.errors import ConfigError
from rl_plugins.models.lora import has_adapter
from rl_plugins.plain_file import load_plain
from rl_plugins.stages.clock import clock, validates_in_training
from rl_plugins.stages.stage import Stage
from rl_plugins.strategies.contract import POLICY, REFERENCE, TEACHER, HasNamedModels, strategy_of
from rl_plugins.strategies.expert_parallel import divides_experts


class PolicyAverage(Callback):
    """Keep an exponential moving average of the trained weights, in float32. Each rank has the average of its shards.

    The average is often better than the trained policy. Validation uses the average; training does not. With a schedule
    that samples ahead, responses in flight during a validation go on with the average, and count as fresh samples.
    `PolicyCheckpoint`, placed behind this callback, saves the average. The average continues if as many ranks resume as
    have saved it, and starts again from the current weights otherwise.

    Args:
        keep: weight of the old average in a step, above 0 and below 1. With 0.99 the average covers about 100 steps.

    Raises:
        ConfigError: `keep` is out of range.

    Example:
        Export the average after training::

            trainer.fit(stage, data)
            with average.swapped_in(trainer):
                stage.export(folder)
    """

    def __init__(self, *, keep: float) -> None:
        check_ranges(float, ABOVE_0_TO_BELOW_1, keep=keep)
        self._keep = keep
        self._average: dict[str, Tensor] = {}
        self._trained_weights: dict[str, Tensor] = {}
        self._last_step = -1

    @override
    @torch.no_grad()
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = clock(pl_module)
        assert isinstance(pl_module, Stage)
        if divides_experts(pl_module.named_models()[pl_module.trained]):
            # The ranks' shards of experts are in another order than their rows; see `read_average`.
            raise ConfigError("PolicyAverage has not been tried with expert_parallel: leave one of them out")
        self._start_again(trainer)

    def _start_again(self, trainer: Trainer) -> None:
        self._average = {name: shard.float().clone() for name, shard in _trained_shards(trainer)}

    @override
    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        previous, self._last_step = self._last_step, clock(pl_module)
        # After a roll-back the clock repeats a step, and the average already includes the step.
        if self._last_step > previous:
            for name, shard in _trained_shards(trainer):
                self._average[name].lerp_(shard.float(), 1 - self._keep)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if validates_in_training(trainer):
            self._swap_in(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if validates_in_training(trainer):
            self._swap_out(trainer)

    @contextmanager
    def swapped_in(self, trainer: Trainer) -> Iterator[None]:
        """Give the model the average as its weights inside this context, for an export or a validation. Collective."""
        self._swap_in(trainer)
        try:
            yield
        finally:
            self._swap_out(trainer)

    @torch.no_grad()
    def _swap_in(self, trainer: Trainer) -> None:
        for name, shard in _trained_shards(trainer):
            self._trained_weights[name] = shard.clone()
            shard.copy_(self._average[name])
        strategy_of(trainer).rollout_phases.weights_changed()

    @torch.no_grad()
    def _swap_out(self, trainer: Trainer) -> None:
        for name, shard in _trained_shards(trainer):
            shard.copy_(self._trained_weights.pop(name))
        strategy_of(trainer).rollout_phases.weights_changed()

    def rank_state(self) -> dict[str, Tensor]:
        """Return this rank's shards of the average, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self._average.items()}

    @torch.no_grad()
    def load_rank_state(self, trainer: Trainer, state: dict[str, Tensor]) -> str:
        """Restore `rank_state` if the shards have equal names and shapes; return the outcome in words. Collective."""
        shapes = {name: tensor.shape for name, tensor in self._average.items()}
        differs = shapes != {name: tensor.shape for name, tensor in state.items()}
        if strategy_of(trainer).ranks.any(differs):
            # After a roll-back, the average has weights of bad steps.
            self._start_again(trainer)
            return "the average starts again (other shards)" if state else ""
        for name, tensor in state.items():
            self._average[name].copy_(tensor)
        return "average"


def read_average(checkpoint: Path, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Read the whole average from a checkpoint, in one process without a process group.

    Args:
        checkpoint: folder of the checkpoint.
        shapes: shape of each whole parameter.

    Returns:
        The average of each parameter, in float32; empty for a run without `PolicyAverage`.

    Raises:
        ConfigError: the run has split its parameters with tensor parallelism.
    """
    files = sorted(checkpoint.glob("callbacks_*.pt"), key=lambda file: int(file.stem.removeprefix("callbacks_")))
    states = [load_plain(file, mmap=True) for file in files]
    averages = [state[PolicyAverage.__name__] for state in states if PolicyAverage.__name__ in state]
    names = [name for name in averages[0] if name in shapes] if averages else []
    if any(averages[0][name].dim() > 1 and averages[0][name].shape[1:] != shapes[name][1:] for name in names):
        raise ConfigError(
            f"the average in {checkpoint} is split by tensor parallelism (tensor_parallel of the strategy), and "
            "the parts cannot be joined here: resume the run (in a recipe: run.resume=true) and let it end; the folder "
            "policy/ then has the average"
        )
    return {name: _join_shards([average[name] for average in averages], shapes[name]) for name in names}


def _join_shards(shards: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Join the shards of a parameter: whole copies, blocks of rows, or blocks of numbers with padding at the end."""
    if shards[0].shape == shape:
        return shards[0]
    return torch.cat([shard.flatten() for shard in shards])[: shape.numel()].view(shape)


def _trained_shards(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    stage: object = trainer.lightning_module
    assert isinstance(stage, Stage)
    model = stage.named_models()[stage.trained]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, shard in strategy_of(trainer).shards(stage.trained):
        if name in trained:
            yield name, shard


_REMEDIES = {
    REFERENCE: "a KL penalty, KLConfig(coefficient=...) (in a recipe: algorithm.kl.coefficient)",
    TEACHER: "a distillation (in a recipe: algorithm=on_policy_distillation)",
}
"""For each model that can follow the policy, the part of the algorithm that needs the model."""


class ReferenceUpdate(Callback):
    """Move the weights of the reference model towards the policy's weights, at the end of every `every`-th step.

    Every checkpoint holds the moved reference. A teacher that follows the policy lets the policy learn from its own
    earlier self.

    Args:
        model: name of the model to move: `reference` or `teacher`.
        every: number of steps between two moves, at least 1.
        keep: weight of the old reference in a move, at least 0 and below 1: 0 copies the policy, 0.99 makes an
            exponential moving average.

    Raises:
        ConfigError: `model` is another model, or `every` or `keep` is out of range.

    Source: an earlier self as the teacher: born-again networks, https://arxiv.org/abs/1805.04770, eq. 2; a moving
    average as the teacher: mean teachers, https://arxiv.org/abs/1703.01780, eq. 2.
    """

    def __init__(self, model: str = REFERENCE, *, every: int = 1, keep: float = 0.0) -> None:
        if model not in _REMEDIES:
            raise ConfigError(f"ReferenceUpdate(model={model!r}): use one of {', '.join(_REMEDIES)}")
        check_ranges(int, AT_LEAST_1, every=every)
        ReferenceConfig.check_fields(keep=keep)
        self._model, self._every, self._keep = model, every, keep
        self._last_step = -1
        self._averages: dict[str, Tensor] = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(model=self._model)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        models = pl_module.named_models() if isinstance(pl_module, HasNamedModels) else {}
        if POLICY in models and has_adapter(models[POLICY]):
            raise ConfigError(
                f"ReferenceUpdate: the policy has an adapter, and the {self._model} has none, so it cannot follow the "
                f"policy: remove the callback (in a recipe: {self._model}.update_every=0)"
            )
        if self._model not in models:
            raise ConfigError(
                f"ReferenceUpdate: the stage has no {self._model} model: use {_REMEDIES[self._model]}, or remove the "
                f"callback (in a recipe: {self._model}.update_every=0)"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = clock(pl_module)
        self._averages = {}
        # This move changes nothing, but from now on checkpoints hold the reference. A roll-back needs the reference in
        # checkpoints from before the first real move, too.
        self._move(trainer, keep=1.0)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        previous, self._last_step = self._last_step, clock(pl_module)
        # After a roll-back the clock shows the step of the checkpoint again, which already has its move.
        if self._last_step > previous and self._last_step % self._every == 0:
            self._move(trainer, self._keep)

    def _move(self, trainer: Trainer, keep: float) -> None:
        strategy_of(trainer).blended.blend(POLICY, self._model, keep, self._averages)

    def rank_state(self) -> dict[str, Tensor]:
        """Return this rank's shards of the average of a model in low precision, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self._averages.items()}

    def load_rank_state(self, trainer: Trainer, state: dict[str, Tensor]) -> str:
        """Restore `rank_state` if the shards have equal names and shapes; return the outcome in words. Collective."""
        strategy = strategy_of(trainer)
        shapes = {name: shard.shape for name, shard in strategy.shards(self._model)}
        same = not strategy.ranks.any(any(shapes.get(name) != tensor.shape for name, tensor in state.items()))
        # `blend` moves the shards to the device of the model.
        self._averages = dict(state) if same else {}
        if not state:
            return ""
        name = f"average of the {self._model}"
        return name if same else f"the {name} starts again (other shards)"
