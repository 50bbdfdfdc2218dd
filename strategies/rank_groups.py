"""Groups of neighbouring ranks: the check of a group's size, joint passes, and tensors gathered from a group's ranks.

The tensors have different sizes along one axis.

Axes: `M` tokens of a rank's row, `G` tokens of the group's row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rl_plugins.errors import ConfigError


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


class JointPasses:
    """Base of classes with hooks that give a forward pass the tokens of several ranks."""


def refuse_joint_passes(model: nn.Module, option: str) -> None:
    """Check that each forward pass of a model has the tokens of one rank. Call after the strategy's `setup`.

    Args:
        model: model of a stage.
        option: option that compares tokens inside a pass with the samples of the rank.

    Raises:
        ConfigError: several ranks run one pass.
    """
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    if any(isinstance(getattr(hook, "__self__", None), JointPasses) for hook in hooks):
        raise ConfigError(
            f"{option} has not been tried with tensor_parallel and sequence_parallel: leave {option} out, or set both "
            "to 1"
        )


def sizes_of(own: Tensor, group: ProcessGroup | None) -> list[int]:
    """Return the size of each rank's tensor along the first axis. Collective."""
    count = torch.distributed.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.long, device=own.device) for _ in range(count)]
    torch.distributed.all_gather(sizes, torch.tensor([len(own)], device=own.device), group=group)
    return [int(size) for size in sizes]


def gather_rows(ids_M: Tensor, positions_M: Tensor, group: ProcessGroup | None) -> tuple[list[int], Tensor, Tensor]:
    """Join the rows of all ranks; return each row's tokens, all token ids [G], all positions [G]. Collective."""
    own_M2 = torch.stack([ids_M, positions_M], dim=1)
    sizes = sizes_of(own_M2, group)
    ids_G, positions_G = torch.cat(gather_parts(own_M2, 0, sizes, group)).unbind(dim=1)
    return sizes, ids_G, positions_G


def inputs_of_pass(args: tuple[Any, ...], kwargs: dict[str, Any], option: str) -> dict[str, Any]:
    """Return the inputs, by name, of a forward pass on all ranks of a group.

    Raises:
        ValueError: the inputs are not a batch of token ids, or include a cache of an earlier pass.
    """
    inputs = {"input_ids": args[0], **kwargs} if args else kwargs
    if len(args) > 1 or inputs.get("input_ids") is None or inputs.get("past_key_values") is not None:
        raise ValueError(f"under {option}, call a model with input_ids, and without past_key_values or other tensors")
    return inputs


def gather_parts(own: Tensor, axis: int, sizes: list[int], group: ProcessGroup | None) -> list[Tensor]:
    """Return the tensors of all ranks. The tensor of rank `i` has `sizes[i]` elements along `axis`. Collective."""
    # Gloo gathers only tensors of equal shape.
    own = own.movedim(axis, 0)
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=group)
    return [part[:size].movedim(0, axis) for part, size in zip(gathered, sizes, strict=True)]
