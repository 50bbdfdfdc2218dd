"""The weights of an FSDP2 engine, as whole tensors gathered one after the other or as the shards each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl_plugins.rollout.weights import WeightMeta


class FSDPWeightSource:
    """Streams parameters that `fully_shard` has cut along their first axis.

    Args:
        module: the engine.
        dtype: that the weights are sent in; their own by default.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        self._named: list[tuple[str, Any]] = list(module.named_parameters())
        self._dtype = dtype

    def metadata(self) -> list[WeightMeta]:
        """Names, dtypes and full shapes; nothing is gathered."""
        return [WeightMeta(name, self._dtype or p.dtype, tuple(p.shape)) for name, p in self._named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors; the extra memory is one tensor. Collective."""
        for name, parameter in self._named:
            yield name, parameter.detach().to(self._dtype or parameter.dtype).full_tensor()

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """This rank's rows of each tensor, flat. Not collective."""
        for name, parameter in self._named:
            mesh, rows, shard = parameter.device_mesh, parameter.shape[0], shard_of(parameter)
            # As torch.chunk: the last ranks may have fewer rows, or none.
            first = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
            yield name, first * (parameter.numel() // max(rows, 1)), shard.to(self._dtype or shard.dtype).view(-1)


def shard_of(parameter: nn.Parameter) -> Tensor:
    """What this rank has of a parameter between passes, without gradient; writing to it changes the parameter."""
    assert isinstance(parameter, DTensor), f"{type(parameter).__name__}: the parameter is not in shards"
    return parameter.to_local().detach()
