"""Tensors of the ranks of a group that differ in size along one axis.

Axes: `M` tokens of a rank's row, `G` of the group's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_plugins.errors import ConfigError


def sizes_of(own: Tensor, group: Any) -> list[int]:
    """How long each rank's tensor is along its first axis. Collective."""
    count = torch.distributed.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.long, device=own.device) for _ in range(count)]
    torch.distributed.all_gather(sizes, torch.tensor([len(own)], device=own.device), group=group)
    return [int(size) for size in sizes]


def gather_rows(ids_M: Tensor, positions_M: Tensor, group: Any) -> tuple[list[int], Tensor, Tensor]:
    """The rows of all ranks end to end: tokens of each rank's, then all token ids and positions [G]. Collective."""
    own_M2 = torch.stack([ids_M, positions_M], dim=1)
    sizes = sizes_of(own_M2, group)
    ids_G, positions_G = torch.cat(gather_parts(own_M2, 0, sizes, group)).unbind(dim=1)
    return sizes, ids_G, positions_G


def inputs_of_pass(args: tuple[Any, ...], kwargs: dict[str, Any], option: str) -> dict[str, Any]:
    """The inputs of a pass that the ranks of a group run together, by name.

    Raises:
        ConfigError: others than a batch of token ids.
    """
    inputs = {"input_ids": args[0], **kwargs} if args else kwargs
    if len(args) > 1 or inputs.get("input_ids") is None or inputs.get("past_key_values") is not None:
        raise ConfigError(f"under {option} a model takes input_ids, and nothing from earlier passes")
    return inputs


def gather_parts(own: Tensor, axis: int, sizes: list[int], group: Any) -> list[Tensor]:
    """Each rank's tensor; they have the `sizes` along `axis`. Collective."""
    # Gloo gathers tensors of one shape only.
    own = own.movedim(axis, 0)
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    everyones = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(everyones, padded, group=group)
    return [part[:size].movedim(0, axis) for part, size in zip(everyones, sizes, strict=True)]
