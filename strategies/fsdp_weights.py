"""The weights of an FSDP2 engine, as whole tensors gathered one after the other or as the shards each rank holds.

With tensor parallelism a tensor is cut twice. What the ranks of a group have in common, or hold as columns and gather,
they share out by rows, so that no two send the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_plugins.rollout.weights import WeightMeta


class FSDPWeightSource:
    """Streams parameters that `fully_shard` has cut along their first axis.

    Args:
        module: the engine.
        dtype: that the weights are sent in; their own by default.
        group_rank: this rank among those that its blocks are cut over.
        group_size: how many they are.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None = None, group_rank: int = 0, group_size: int = 1
    ) -> None:
        self._named: list[tuple[str, Any]] = list(module.named_parameters())
        self._dtype, self._group_rank, self._group_size = dtype, group_rank, group_size

    def metadata(self) -> list[WeightMeta]:
        """Names, dtypes and full shapes; nothing is gathered."""
        return [WeightMeta(name, self._dtype or p.dtype, tuple(p.shape)) for name, p in self._named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors; the extra memory is one tensor. Collective."""
        for name, parameter in self._named:
            yield name, parameter.detach().to(self._dtype or parameter.dtype).full_tensor()

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """This rank's rows of each tensor, flat. Collective in its tensor group, but not beyond."""
        for name, parameter in self._named:
            first, rows = self._rows(parameter)
            numel_of_row = parameter.numel() // max(parameter.shape[0], 1)
            yield name, first * numel_of_row, rows.to(self._dtype or rows.dtype).reshape(-1)

    def _rows(self, parameter: Any) -> tuple[int, Tensor]:
        """Which rows of a tensor this rank sends: the number of the first, and the rows."""
        mesh, rows = parameter.device_mesh, parameter.shape[0]
        own = shard_of(parameter)
        rank, size = mesh.get_local_rank(0), mesh.size(0)
        if mesh.ndim == 1 and mesh.size() == torch.distributed.get_world_size():
            return chunk(rows, size, rank)[0], own
        cut = parameter.placements[-1] if mesh.ndim == 2 else Replicate()
        if cut.is_shard(0):
            first, count = chunk(rows, self._group_size, self._group_rank)
            return first + chunk(count, size, rank)[0], own
        if cut.is_shard():
            own = parameter.detach().redistribute(placements=[Shard(0), Replicate()]).to_local()
        first, count = chunk(rows, size, rank)
        start, count = chunk(count, self._group_size, self._group_rank)
        return first + start, own[start : start + count]


def chunk(total: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of one part as `torch.chunk` cuts them: the last ones may have less than others, or nothing."""
    size = -(-total // parts)
    start = min(index * size, total)
    return start, min(size, total - start)


def shard_of(parameter: nn.Parameter) -> Tensor:
    """What this rank has of a parameter between passes, without gradient; writing to it changes the parameter."""
    assert isinstance(parameter, DTensor), f"{type(parameter).__name__}: the parameter is not in shards"
    return parameter.to_local().detach()
