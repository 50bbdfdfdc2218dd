"""Tensors of the ranks of a group that differ in size along one axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sizes_of(own: Tensor, group: Any) -> list[int]:
    """How long each rank's tensor is along its first axis. Collective."""
    count = torch.distributed.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.long, device=own.device) for _ in range(count)]
    torch.distributed.all_gather(sizes, torch.tensor([len(own)], device=own.device), group=group)
    return [int(size) for size in sizes]


def gather_parts(own: Tensor, axis: int, sizes: list[int], group: Any) -> list[Tensor]:
    """Each rank's tensor; they have the `sizes` along `axis`. Collective."""
    # Gloo gathers tensors of one shape only.
    own = own.movedim(axis, 0)
    padded = own.new_zeros(max(sizes), *own.shape[1:])
    padded[: len(own)] = own
    everyones = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(everyones, padded, group=group)
    return [part[:size].movedim(0, axis) for part, size in zip(everyones, sizes, strict=True)]
