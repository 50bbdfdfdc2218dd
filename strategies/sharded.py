"""Common parts of `ZeroStrategy` and `FSDPStrategy`, which shard every model over the training ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rl_plugins.errors import ConfigError
from rl_plugins.models.remote import RemoteLearner, RemoteModel
from rl_plugins.strategies.sequence_parallel import SequenceShards

LIGHTNING_FILE = "lightning.ckpt"
"""File of a checkpoint with the states of Lightning's loops, of callbacks and of the stage."""
RESTORED_LEARNER = "weights, optimizer, schedule"
"""Restored states of a `RemoteLearner`, in words."""


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


def save_learners(models: Mapping[str, nn.Module], folder: Path) -> None:
    """Save every `RemoteLearner` to a folder. Only one rank calls this function."""
    for name, model in models.items():
        if isinstance(model, RemoteLearner):
            model.save(folder / name)
