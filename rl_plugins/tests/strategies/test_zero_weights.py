"""The shards of ZeRO-3, on parameters partitioned by hand as DeepSpeed does: equal parts, the last one padded."""

from __future__ import annotations

import math
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from rl_plugins.strategies.weight_sources import ZeroWeightSource, layer_of
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.loops import for_each

SHAPES = [(1,), (2,), (3, 5), (7,), (4, 4), ()]


def partitioned(rank: int, world_size: int, parts: int | None = None) -> nn.Module:
    """Return parameters `p0`, `p1`, ... of consecutive numbers. This rank holds its partition."""
    module = nn.Module()
    for index, shape in enumerate(SHAPES):
        numel = math.prod(shape)
        size = math.ceil(numel / (parts or world_size))
        padded = torch.full((size * world_size,), torch.nan)
        padded[:numel] = torch.arange(numel) + 100 * index
        parameter = nn.Parameter(torch.empty(0))
        parameter.ds_tensor = padded[rank * size : (rank + 1) * size]  # type: ignore[attr-defined]
        parameter.ds_shape, parameter.ds_numel = torch.Size(shape), numel  # type: ignore[attr-defined]
        module.register_parameter(f"p{index}", parameter)
    return module


@for_each("world_size", [1, 2, 3, 8])
def test_shards_of_all_ranks_tile_each_tensor_without_padding(world_size: int) -> None:
    whole: dict[str, Tensor] = {f"p{i}": torch.full((math.prod(shape),), -1.0) for i, shape in enumerate(SHAPES)}
    for rank in range(world_size):
        source = ZeroWeightSource(partitioned(rank, world_size), rank, world_size)
        assert [meta.shape for meta in source.metadata()] == SHAPES
        for name, start, part in source.shards():
            assert (whole[name][start : start + len(part)] == -1).all()
            whole[name][start : start + len(part)] = part
    for index, values in enumerate(whole.values()):
        assert values.tolist() == [100 * index + i for i in range(len(values))]


def test_shards_refuses_parameters_without_partitions() -> None:
    source = ZeroWeightSource(partitioned(0, 2, parts=1), 0, 2)
    with pytest.raises(AssertionError, match="p1 is not partitioned over the 2 ranks"):
        list(source.shards())


def test_shards_of_the_strategy_leave_out_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed does not initialize padding, so a check of the weights must not see it."""
    module = partitioned(rank=1, world_size=2)
    released: list[str] = []
    optimizer = SimpleNamespace(empty_partition_cache=lambda: released.append("all"))
    strategy = ZeroStrategy(stage=3)
    monkeypatch.setattr(ZeroStrategy, "global_rank", 1)
    monkeypatch.setattr(ZeroStrategy, "world_size", 2)
    strategy._model_engines["critic"] = SimpleNamespace(module=module, optimizer=optimizer)
    shards = dict(strategy.shards("critic"))
    assert list(shards) == [f"p{index}" for index in range(len(SHAPES))] and released == ["all"]
    assert [len(shard) for shard in shards.values()] == [math.prod(shape) // 2 for shape in SHAPES]
    assert all(shard.isfinite().all() for shard in shards.values())


def test_layer_of_groups_parameters_by_layer() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.10.mlp.experts.3.up.weight",
        "model.layers.10.norm.weight",
        "model.norm.weight",
    ]
    groups = [key for key, _ in groupby(names, key=layer_of)]
    assert groups == ["model.embed_tokens.weight", "model.layers.0", "model.layers.10", "model.norm.weight"]
