"""Muon on the shards of ranks: the bits of whole matrices, with few collectives that NCCL takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.optim import Muon

from rl_plugins.models import muon
from rl_plugins.models.muon import ShardedMuon
from rl_plugins.tests.fake_cuda import CUDA
from rl_plugins.tests.nccl_tensors import NcclTensors
from rl_plugins.tests.ranks import run_ranks

SHAPES = [(8, 16), (24, 8), (7, 5), (8, 16), (1, 9), (13, 13), (3, 20)]
"""Rows and columns: more columns, more rows, rows that no number of ranks divides, and fewer rows than ranks."""
EXCHANGE = ["alltoall_base_"] * 2
"""Collectives of one exchange: updates to the owners of the matrices, and results back."""


def layers(shapes: Sequence[tuple[int, int]]) -> nn.Sequential:
    """Linear layers whose weights have the shapes, equal on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in shapes))


def compare(whole: nn.Module, sharded: nn.Module, *, steps: int = 3, tolerance: float = 0, **options: Any) -> list[str]:
    """Take steps with whole matrices and with shards; compare the results, and return the collectives of a step."""
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw", **options}
    expected, optimizer = Muon(whole.parameters(), **options), ShardedMuon(sharded.parameters(), **options)
    pairs = list(zip(whole.parameters(), sharded.parameters(), strict=True))
    for _ in range(steps):
        for matrix, shards in pairs:
            matrix.grad = torch.randn_like(matrix)
            shards.grad = like(shards, matrix.grad)
        expected.step()
        with NcclTensors(lambda tensor: CUDA) as nccl:
            optimizer.step()
    for matrix, shards in pairs:
        momentum = expected.state[matrix]["momentum_buffer"]
        for wanted, got in ((matrix.detach(), shards), (momentum, optimizer.state[shards]["momentum_buffer"])):
            assert isinstance(got, DTensor)
            part = like(shards, wanted).to_local()
            torch.testing.assert_close(got.to_local(), part, rtol=tolerance, atol=tolerance)
    return nccl.collectives


def like(shards: nn.Parameter, whole: torch.Tensor) -> DTensor:
    """Cut a whole tensor as a parameter is cut."""
    assert isinstance(shards, DTensor)
    return distribute_tensor(whole, shards.device_mesh, shards.placements, src_data_rank=None)


def step_shards(rank: int, mesh: tuple[int, ...], shapes: Sequence[tuple[int, int]], **options: Any) -> list[str]:
    """See `compare`. The ranks of a mesh with two dimensions have copies of the shards."""
    whole, sharded = layers(shapes), layers(shapes)
    fully_shard(sharded, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("copies", "shards")[-len(mesh) :]))
    return compare(whole, sharded, **options)


def step_in_rounds(rank: int) -> list[str]:
    """See `compare`. A rank owns one large matrix, or two small ones, at once."""
    with mock.patch.object(muon, "ELEMENTS_AT_ONCE", 150):
        return step_shards(rank, (2,), SHAPES)


def step_variants(rank: int) -> None:
    """See `compare`; without Nesterov's momentum, and in bfloat16, where CPUs round whole matrices otherwise."""
    step_shards(rank, (2,), SHAPES, nesterov=False)
    whole, sharded = layers(SHAPES).bfloat16(), layers(SHAPES).bfloat16()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    compare(whole, sharded, steps=1, tolerance=2**-7)


def step_parts_of_tensor_parallelism(rank: int, mesh: tuple[int, int], shapes: Sequence[tuple[int, int]]) -> list[str]:
    """See `compare`. The first half of the matrices is cut by rows, the other one by columns."""
    whole, sharded = layers(shapes), layers(shapes)
    ranks = init_device_mesh("cpu", mesh, mesh_dim_names=("shards", "parts"))
    styles: list[ParallelStyle] = [ColwiseParallel(), RowwiseParallel()]
    plan = {str(index): styles[2 * index // len(shapes)] for index in range(len(shapes))}
    parallelize_module(sharded, ranks["parts"], plan)
    fully_shard(sharded, mesh=ranks["shards"])
    return compare(whole, sharded)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_sharded_muon_has_the_bits_of_whole_matrices_and_two_collectives(mesh: tuple[int, ...]) -> None:
    results = run_ranks(step_shards, mesh, SHAPES, world_size=math.prod(mesh))
    assert [collectives for collectives, _ in results] == [EXCHANGE] * len(results)


def test_sharded_muon_works_with_fewer_matrices_than_ranks() -> None:
    assert run_ranks(step_shards, (2,), SHAPES[:1])[0][0] == EXCHANGE


def test_sharded_muon_exchanges_large_matrices_in_rounds() -> None:
    # (24, 8), (13, 13) | (8, 16), (8, 16) | (3, 20), (7, 5), (1, 9)
    assert run_ranks(step_in_rounds)[0][0] == EXCHANGE * 3


def test_sharded_muon_works_without_nesterov_and_in_bfloat16() -> None:
    run_ranks(step_variants)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 2)], ids=str)
def test_sharded_muon_has_the_bits_of_whole_matrices_under_tensor_parallelism(mesh: tuple[int, int]) -> None:
    shapes = [(8, 12), (6, 16), (10, 12), (8, 12), (7, 10), (16, 6)]
    for collectives, _ in run_ranks(step_parts_of_tensor_parallelism, mesh, shapes, world_size=math.prod(mesh)):
        # Both kinds of cuts have an exchange in each dimension of the mesh.
        assert collectives == EXCHANGE * 2 * mesh[0]
