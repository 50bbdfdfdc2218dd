"""Common functions of the strategies: groups of ranks, optimizers by model, and the folder of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_plugins.errors import CheckpointError, ConfigError
from rl_plugins.models.remote import RemoteLearner, RemoteModel
from rl_plugins.ranks import Ranks
from rl_plugins.strategies.blending import BlendedModels
from rl_plugins.strategies.sequence_parallel import SequenceShards

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


# The folder of a checkpoint -------------------------------------------------------------------------------------


def learners_of(models: Mapping[str, nn.Module]) -> dict[str, RemoteLearner]:
    """Return the models trained in another process."""
    return {name: model for name, model in models.items() if isinstance(model, RemoteLearner)}


def save_unsharded(folder: Path, models: Mapping[str, nn.Module], lightning: dict[str, Any]) -> None:
    """Save learners, and the states of Lightning's loops, of callbacks and of the stage. Only one rank calls this."""
    for name, learner in learners_of(models).items():
        learner.save(folder / name)
    torch.save(lightning, folder / _LIGHTNING_FILE)


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
    # The file holds plain Python objects, and was written by this program.
    states: dict[str, Any] = torch.load(folder / _LIGHTNING_FILE, map_location="cpu", weights_only=False)
    return states
