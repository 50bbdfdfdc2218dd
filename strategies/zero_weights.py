"""The weights of a ZeRO-3 engine, as whole tensors gathered layer by layer or as the shards each rank holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from rl_plugins.rollout.weights import WeightMeta


def layer_of(name: str) -> str:
    """The part of a parameter's name up to its first index: parameters that share it are gathered together.

    `model.layers.3.mlp.up_proj.weight` belongs to `model.layers.3`; names without an index stand alone.
    """
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else name


class ZeroWeightSource:
    """Streams parameters that DeepSpeed has partitioned (`ds_tensor`, `ds_shape`)."""

    def __init__(self, module: nn.Module, rank: int, world_size: int) -> None:
        # DeepSpeed adds ds_shape, ds_numel and ds_tensor to the parameters that it partitions.
        self._named: list[tuple[str, Any]] = list(module.named_parameters())
        self._rank, self._world_size = rank, world_size

    def metadata(self) -> list[WeightMeta]:
        """Names, dtypes and full shapes; nothing is gathered."""
        return [WeightMeta(name, p.dtype, tuple(p.ds_shape)) for name, p in self._named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors; the extra memory is one layer. Collective."""
        import deepspeed

        for _, members in groupby(self._named, key=lambda named: layer_of(named[0])):
            layer = list(members)
            with deepspeed.zero.GatheredParameters([p for _, p in layer]):
                for name, parameter in layer:
                    yield name, parameter.detach()

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """This rank's partition of each flattened tensor, without its padding. Not collective."""
        for name, parameter in self._named:
            partition: Tensor = parameter.ds_tensor
            if partition.numel() != -(-parameter.ds_numel // self._world_size):
                raise AssertionError(f"{name} is not partitioned over the {self._world_size} ranks")
            start = min(self._rank * partition.numel(), parameter.ds_numel)
            stop = min(start + partition.numel(), parameter.ds_numel)
            yield name, start, partition.detach().view(-1)[: stop - start]
