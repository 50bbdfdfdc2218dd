"""Weights of sharded models, as whole tensors (gathered one after the other) or as each rank's shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rl_plugins.models.lora import plain_weights
from rl_plugins.strategies.zero_release import release_in_flight
from rl_plugins.weights.source import WeightMeta, WeightSource, full_tensor


def layer_of(name: str) -> str:
    """Return a parameter's name up to the first index, or the whole name. A layer's parameters are gathered together.

    The layer of `model.layers.3.mlp.up_proj.weight` is `model.layers.3`.
    """
    match = re.match(r"(.*?\.\d+)\.", name)
    return match.group(1) if match else name


def zero_weights(engine: Any, rank: int, world_size: int) -> WeightSource:
    """Return the weights of a model under ZeRO-3, with the adapter merged if the model has an adapter."""
    release = partial(release_in_flight, engine)
    return plain_weights(ZeroWeightSource(engine.module, rank, world_size, release), engine.module, release)


class ZeroWeightSource:
    """Weights of a model under ZeRO-3.

    Args:
        module: model with parameters partitioned by DeepSpeed (`ds_tensor`, `ds_shape`).
        rank: number of this rank.
        world_size: number of training ranks.
        release: releases parameters that are gathered ahead; see `release_in_flight`.
    """

    def __init__(
        self, module: nn.Module, rank: int, world_size: int, release: Callable[[], None] = lambda: None
    ) -> None:
        self._release = release
        # DeepSpeed adds ds_shape, ds_numel and ds_tensor to partitioned parameters.
        self._named: list[tuple[str, Any]] = list(module.named_parameters())
        self._rank, self._world_size = rank, world_size

    def metadata(self) -> list[WeightMeta]:
        """Return names, dtypes and full shapes, without gathering anything."""
        return [WeightMeta(name, p.dtype, tuple(p.ds_shape)) for name, p in self._named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors. One layer is gathered at a time. Collective."""
        import deepspeed

        self._release()
        for _, members in groupby(self._named, key=lambda named: layer_of(named[0])):
            layer = list(members)
            with deepspeed.zero.GatheredParameters([p for _, p in layer]):
                for name, parameter in layer:
                    yield name, parameter.detach()

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield name, offset and values of this rank's part of each flat tensor, without padding. Not collective."""
        for name, parameter in self._named:
            partition: Tensor = parameter.ds_tensor
            if partition.numel() != -(-parameter.ds_numel // self._world_size):
                raise AssertionError(f"{name} is not partitioned over the {self._world_size} ranks")
            start = min(self._rank * partition.numel(), parameter.ds_numel)
            stop = min(start + partition.numel(), parameter.ds_numel)
            yield name, start, partition.detach().view(-1)[: stop - start]


class FSDPWeightSource:
    """Weights of a model under `fully_shard`, which cuts parameters along the first axis.

    With tensor parallelism, a tensor is cut twice. To send each row once, the ranks of a group divide the rows of
    replicated tensors, and of tensors cut by columns (after a gather). With several copies of the model, the ranks with
    equal shards divide the rows, too. With expert parallelism, tensors of experts are cut twice.

    Args:
        module: model.
        dtype: dtype of the sent weights of floating-point numbers; None for the dtype of the parameters.
        group_rank: number of this rank in the tensor-parallel or expert-parallel group.
        group_size: number of ranks in a tensor-parallel or expert-parallel group.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None = None, group_rank: int = 0, group_size: int = 1
    ) -> None:
        self._named: list[tuple[str, Any]] = list(module.named_parameters())
        self._dtype, self._group_rank, self._group_size = dtype, group_rank, group_size

    def metadata(self) -> list[WeightMeta]:
        """Return names, dtypes and full shapes, without gathering anything."""
        return [WeightMeta(name, self._sent_dtype(p), tuple(p.shape)) for name, p in self._named]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors. One tensor is gathered at a time. Collective."""
        for name, parameter in self._named:
            yield name, full_tensor(parameter.detach().to(self._sent_dtype(parameter)))

    def shards(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield name, offset and values of this rank's rows of each tensor. Collective in a tensor-parallel group."""
        for name, parameter in self._named:
            first, rows = self._rows(parameter)
            numel_of_row = parameter.numel() // max(parameter.shape[0], 1)
            yield name, first * numel_of_row, rows.to(self._sent_dtype(parameter)).reshape(-1)

    def _sent_dtype(self, parameter: Tensor) -> torch.dtype:
        # Codes of 4-bit weights are bytes.
        return self._dtype if self._dtype and parameter.is_floating_point() else parameter.dtype

    def _rows(self, parameter: Any) -> tuple[int, Tensor]:
        """Return the index of this rank's first row to send, and the rows."""
        mesh, rows = parameter.device_mesh, parameter.shape[0]
        own = shard_of(parameter)
        rank, size = mesh.get_local_rank(0), mesh.size(0)
        if mesh.ndim == 1 and mesh.size() == torch.distributed.get_world_size():
            return chunk(rows, size, rank)[0], own
        if mesh.mesh_dim_names == ("copies", "shards"):
            # The ranks with equal shards divide the rows.
            first, count = chunk(rows, mesh.size(1), mesh.get_local_rank(1))
            start, count = chunk(count, size, rank)
            return first + start, own[start : start + count]
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
    """Return start and length of one part of `torch.chunk`; the last parts may be shorter or empty."""
    size = -(-total // parts)
    start = min(index * size, total)
    return start, min(size, total - start)


def shard_of(parameter: nn.Parameter) -> Tensor:
    """Return this rank's shard of a parameter, without gradient. A write to the shard changes the parameter."""
    assert isinstance(parameter, DTensor), f"{type(parameter).__name__}: the parameter is not in shards"
    return parameter.to_local().detach()
