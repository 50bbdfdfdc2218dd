"""Places of the elements of each parameter: the stretches of all workers tile every parameter once."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_plugins.errors import CheckpointError
from rl_plugins.strategies.zero_shards import Stretch, ZeroShards, stretches_of_shapes, stretches_of_slices
from rl_plugins.tests.loops import for_each

SHAPES = [{"a": (3, 5), "b": (1,)}, {"c": (7,), "d": (4, 4), "e": ()}]


def partitions(workers: int) -> list[list[torch.Tensor]]:
    """The flat partitions of every worker under stages 1 and 2: each group cut in equal parts, numbered elements."""
    groups = []
    for index, group in enumerate(SHAPES):
        flat = torch.cat([torch.arange(math.prod(shape)) + 100 * i for i, shape in enumerate(group.values())])
        padded = torch.nn.functional.pad(flat + 1000 * index, (0, -len(flat) % workers), value=-1)
        groups.append(padded.chunk(workers))
    return [[group[worker] for group in groups] for worker in range(workers)]


def slices(workers: int) -> list[list[dict[str, Any]]]:
    """Return addresses in DeepSpeed's form."""
    mappings: list[list[dict[str, Any]]] = []
    for worker in range(workers):
        mapping = []
        for group in SHAPES:
            size = -(-sum(map(math.prod, group.values())) // workers)
            begin, offset, addresses = worker * size, 0, {}
            for name, shape in group.items():
                start, stop = max(offset, begin), min(offset + math.prod(shape), begin + size)
                if start < stop:
                    addresses[name] = SimpleNamespace(start=start - begin, numel=stop - start)
                offset += math.prod(shape)
            mapping.append(addresses)
        mappings.append(mapping)
    return mappings


def check_tiles(workers: list[list[Stretch]]) -> None:
    for group in SHAPES:
        for name, shape in group.items():
            spans = [(s.start, s.start + s.numel) for held in workers for s in held if s.name == name]
            assert [i for start, stop in spans for i in range(start, stop)] == list(range(math.prod(shape)))


@for_each("workers", [1, 2, 3, 4, 8])
def test_stretches_of_shapes_cut_each_parameter_under_stage_3(workers: int) -> None:
    held = stretches_of_shapes([{n: torch.Size(s) for n, s in group.items()} for group in SHAPES], workers)
    check_tiles(held)
    # One parameter after the other, each padded to equal parts.
    parts = [math.ceil(numel / workers) for numel in (15, 7, 16)]
    assert [s.offset for s in held[-1]] == [0, parts[0], 0, parts[1], parts[1] + parts[2]]


@for_each("workers", [1, 2, 3, 4, 8])
def test_stretches_of_slices_cut_whole_groups_under_stages_1_and_2(workers: int) -> None:
    held = stretches_of_slices(slices(workers))
    check_tiles(held)
    flat = partitions(workers)
    for worker, stretches in enumerate(held):
        for s in stretches:
            values = flat[worker][s.partition][s.offset : s.offset + s.numel]
            first = 1000 * s.partition + 100 * list(SHAPES[s.partition]).index(s.name) + s.start
            assert values.tolist() == list(range(first, first + s.numel))


def test_zero_shards_refuses_a_folder_without_shards(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="holds no shards of a model engine"):
        ZeroShards(tmp_path)
