"""Common parts of the strategies: groups of ranks, optimizers by model, optimizer steps, the folder of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import Tensor, nn
from torch.optim import Muon, Optimizer
from typing_extensions import override

from rl_plugins.errors import CheckpointError, ConfigError, StorageError
from rl_plugins.manifest import CheckpointWriter
from rl_plugins.models.muon import MuonAndAdamW
from rl_plugins.models.remote import RemoteLearner, RemoteModel
from rl_plugins.plain_file import load_plain
from rl_plugins.ranks import Ranks, barrier, broadcast, gather
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.contract import HasNamedModels
from rl_plugins.strategies.rollout_phases import RolloutPhases
from rl_plugins.strategies.sequence_parallel import SequenceShards

T = TypeVar("T")

_LIGHTNING_FILE = "lightning.ckpt"


def check_divides(option: str, group_size: int, world_size: int) -> None:
    """Check the number of training ranks for whole groups.

    Raises:
        ConfigError: the group size does not divide the number of ranks.
    """
    if world_size % group_size:
        raise ConfigError(
            f"{option}={group_size} does not divide the {world_size} training workers into whole groups: use 1, or a "
            "divisor of the number of workers"
        )


def share_sequences(models: Mapping[str, nn.Module], group_size: int) -> list[SequenceShards]:
    """Let groups of neighbouring ranks share the tokens of micro-batches. Call before sharding. Collective."""
    if group_size == 1:
        return []
    group, _ = torch.distributed.new_subgroups(group_size)
    return [SequenceShards(model, name, group) for name, model in local_models(models).items()]


def stop_sharing(sequences: list[SequenceShards]) -> None:
    """Undo `share_sequences`."""
    while sequences:
        sequences.pop().remove()


def local_models(models: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models of this process, without models in other processes."""
    return {name: model for name, model in models.items() if not isinstance(model, RemoteModel)}


def optimizers_of(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    """Return the optimizer of each trained model.

    Raises:
        ConfigError: a model has several optimizers.
    """
    trained = {}
    for name, model in models.items():
        parameters = {id(p) for p in model.parameters()}
        own = [o for o in optimizers if any(id(p) in parameters for group in o.param_groups for p in group["params"])]
        if len(own) > 1:
            raise ConfigError(
                f"model {name!r} has {len(own)} optimizers: return one optimizer for each model in configure_optimizers"
            )
        if own:
            trained[name] = own[0]
    return trained


def optimizer_states(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's states."""
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def library_of(optimizer: Optimizer) -> str:
    """Return the top package of the optimizer's class, such as `torch`."""
    return type(optimizer).__module__.partition(".")[0]


def check_optimizer_of_zero(optimizer: Optimizer) -> None:
    """Check an optimizer for flat pieces of all parameters, which ZeRO gives to an optimizer.

    Raises:
        ConfigError: the optimizer needs whole parameters.
    """
    if isinstance(optimizer, Muon | MuonAndAdamW):
        raise ConfigError("Muon needs whole matrices, which ZeRO cuts into flat pieces: use RayFSDPStrategy")
    if library_of(optimizer) == "torchao":
        raise ConfigError(
            f"torchao's {type(optimizer).__name__} has states of full size under ZeRO, which cuts parameters into flat "
            "pieces: use RayFSDPStrategy, or bitsandbytes.optim.AdamW8bit"
        )


def check_optimizer_of_fsdp(optimizer: Optimizer) -> None:
    """Check an optimizer for DTensors, the shards of FSDP2.

    Raises:
        ConfigError: the optimizer's kernels refuse DTensors.
    """
    if library_of(optimizer) == "bitsandbytes":
        raise ConfigError(
            f"bitsandbytes' {type(optimizer).__name__} refuses DTensors, the shards of FSDP2: use "
            "torchao.optim.AdamW8bit, or RayZeroStrategy"
        )


def restored_states(model: nn.Module, optimizer: Optimizer | None, schedulers: Sequence[Any]) -> str:
    """Return the restored states of a model, in words.

    Args:
        model: model with states in a checkpoint.
        optimizer: optimizer of the model in this process, if there is one.
        schedulers: Lightning's `lr_scheduler_configs`.
    """
    if isinstance(model, RemoteLearner):
        return "weights, optimizer, schedule"
    scheduled = any(config.scheduler.optimizer is optimizer for config in schedulers)
    return "weights" + ", optimizer" * (optimizer is not None) + ", schedule" * scheduled


# Waits of the ranks ----------------------------------------------------------------------------------------------


class HostWaits(LightningStrategy):
    """Waits of a strategy between the hosts of the ranks, as in `rl_plugins.ranks`, with the waits of Lightning.

    A subclass has a strategy of Lightning as its last base.
    """

    @override
    def barrier(self, name: str | None = None) -> None:
        barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return broadcast(obj, src)


# Optimizer steps of PyTorch --------------------------------------------------------------------------------------


class AutogradSteps(LightningStrategy):
    """Backward passes and optimizer steps of a strategy whose model engine is the model itself.

    A subclass has a strategy of Lightning as its second base, and sets `_optimizers_of` in `setup`.
    """

    rollout_phases: RolloutPhases

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._optimizers_of: dict[str, Optimizer] = {}
        self._gradient_norms: dict[str, float] = {}

    def clip_gradients(self, name: str, limit: float) -> float:
        """Clip the gradient of model `name` to a global norm of at most `limit`; return the norm before."""
        raise NotImplementedError

    def gradient_norm(self, name: str) -> float | None:
        """Return the global norm of the last step's gradient before clipping."""
        return self._gradient_norms.get(name)

    def optimizer_index(self, name: str) -> int:
        """Return the index of the optimizer of model `name` in `optimizers`."""
        return next(i for i, optimizer in enumerate(self.optimizers) if optimizer is self._optimizers_of[name])

    @override
    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        *args: Any,
        model_name: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute gradients; Lightning calls `backward` from `manual_backward`, or from its own loop.

        Autograd finds the parameters from the loss. Therefore `model_name`, which ZeRO needs, is unused.
        """
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step the model of `optimizer`. The next rollout phase then sends the weights to the rollout engine.

        Lightning calls `optimizer_step` from `LightningOptimizer.step`; `super()` calls `optimizer.step`, which updates
        the parameters, or shards, of this rank.
        """
        self.rollout_phases.memory.wait_for_optimizer()
        module = self.lightning_module
        stage = module if isinstance(module, HasNamedModels) and not module.automatic_optimization else None
        if stage is not None:
            # Like DeepSpeed: the step clips and clears the gradients.
            name = next(name for name, own in self._optimizers_of.items() if own is optimizer)
            self._gradient_norms[name] = self.clip_gradients(name, stage.gradient_clip(name) or float("inf"))
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if stage is not None:
            optimizer.zero_grad()
        self.rollout_phases.weights_changed()
        return result


# The folder of a checkpoint -------------------------------------------------------------------------------------


def learners_of(models: Mapping[str, nn.Module]) -> dict[str, RemoteLearner]:
    """Return the models trained in another process."""
    return {name: model for name, model in models.items() if isinstance(model, RemoteLearner)}


def writer_of(storage_options: object, folder: Path) -> CheckpointWriter:
    """Return the writer that `PolicyCheckpoint` passes as `storage_options`, or a new writer. Make the folder."""
    writer = storage_options if isinstance(storage_options, CheckpointWriter) else CheckpointWriter(folder)
    writer.make_folder(folder)
    return writer


def check_written(writer: CheckpointWriter, storage_options: object, path: Path) -> None:
    """Wait until all ranks have written their files of a checkpoint, and check the files. Collective.

    Raises:
        StorageError: see `check_failures`.
    """
    check_failures(gather(writer.failure), writer, storage_options, path)


def check_failures(
    failures: Iterable[str | None], writer: CheckpointWriter, storage_options: object, path: Path
) -> None:
    """Check if all files of a checkpoint are written.

    `PolicyCheckpoint` reads the failures of the writer that it passes as `storage_options`.

    Raises:
        StorageError: a rank could not write a file with a writer of `writer_of`.
    """
    failure = next((failure for failure in failures if failure is not None), None)
    if failure is not None and writer is not storage_options:
        raise StorageError(f"the checkpoint {path} is not saved: {failure}")


def save_unsharded(
    writer: CheckpointWriter, folder: Path, models: Mapping[str, nn.Module], lightning: dict[str, Any]
) -> None:
    """Save learners, and the states of Lightning's loops, of callbacks and of the stage. Only one rank calls this."""
    for name, learner in learners_of(models).items():
        save_learner(writer, learner, folder / name)
    writer.save(lightning, folder / _LIGHTNING_FILE)


def save_learner(writer: CheckpointWriter, learner: RemoteLearner, folder: Path) -> None:
    """Let the process of a learner save the learner."""
    if writer.failure is None:
        try:
            learner.save(folder)
        except OSError as error:
            writer.fail(folder, error)
        writer.add_folder(folder)


def check_folder(folder: Path, blended: BlendedModels) -> None:
    """Check a folder before the first model is loaded.

    Raises:
        CheckpointError: the folder is no checkpoint, or lacks a blended model.
    """
    if not (folder / _LIGHTNING_FILE).is_file():
        raise CheckpointError(f"{folder} is not a checkpoint of this package: it has no file {_LIGHTNING_FILE}")
    blended.check_in(folder)


def load_learner(learner: RemoteLearner, folder: Path, ranks: Ranks) -> None:
    """Load a learner on rank 0. Collective."""
    if ranks.rank == 0:
        learner.load(folder)
    ranks.wait()


def read_lightning(folder: Path) -> dict[str, Any]:
    """Return the states of Lightning's loops, of callbacks and of the stage."""
    states: dict[str, Any] = load_plain(folder / _LIGHTNING_FILE)
    return states
