"""NcclTensors raises for tensors that NCCL refuses, over two ranks with a fake GPU each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rl_plugins.ranks import Ranks, barrier, broadcast, gather
from rl_plugins.tests.fake_cuda import CUDA, FakeCuda
from rl_plugins.tests.nccl_tensors import NcclTensors
from rl_plugins.tests.ranks import run_ranks


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, device=CUDA)


# Collective, and the message.
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: dist.all_reduce(torch.ones(2)), "allreduce_: NCCL takes tensors on cuda:0, not on cpu"),
    (lambda: dist.broadcast(on_gpu(2).cpu(), src=0), "broadcast_: NCCL takes tensors on cuda:0, not on cpu"),
    (lambda: dist.all_reduce(on_gpu(2, dtype=torch.int16)), "allreduce_: NCCL has no torch.int16"),
    (lambda: dist.all_reduce(on_gpu(2, 3).T), r"allreduce_: NCCL takes contiguous tensors, not strides \(1, 3\)"),
    (
        lambda: dist.all_gather([on_gpu(2), on_gpu(4)[::2]], on_gpu(2)),
        r"allgather_: NCCL takes contiguous tensors, not strides \(2,\)",
    ),
    (lambda: dist.all_to_all_single(on_gpu(2), torch.ones(2)), "alltoall_base_: .* not on cpu"),
    (lambda: dist.all_gather_into_tensor(torch.ones(4), on_gpu(2)), "_allgather_base_: .* not on cpu"),
]


def refuse(rank: int) -> None:
    for collective, message in REFUSED:
        with (
            FakeCuda() as gpu,
            NcclTensors(gpu.device_of) as checks,
            pytest.raises((AssertionError, RuntimeError), match=message),
        ):
            collective()
        assert checks.collectives == []


def communicate(rank: int) -> dict[str, Any]:
    """Return the results of collectives between two ranks, and the names of the collectives."""
    with FakeCuda() as gpu, NcclTensors(gpu.device_of) as checks:
        ranks = Ranks(rank, 2, CUDA)
        own = on_gpu(3, dtype=torch.int64) * rank
        dist.all_reduce(own)
        assert own.device == CUDA
        barrier()
        return {
            "own": own.cpu().tolist(),
            "sum": ranks.sum(torch.tensor([rank + 1, 5])).tolist(),
            "sum on the device": ranks.sum(on_gpu(2, 2) * rank).cpu().tolist(),
            "max": ranks.max(on_gpu(1, dtype=torch.int16) * rank).cpu().tolist(),
            "any": ranks.any(rank == 1),
            "gather": ranks.gather(torch.tensor([rank])),
            "exchange": ranks.exchange([f"{rank} to {other}" for other in range(2)]),
            "objects": (gather(rank), broadcast({"rank": rank})),
            "collectives": set(checks.collectives),
        }


def test_nccl_tensors_refuses_tensors_of_the_host_of_other_dtypes_and_with_gaps() -> None:
    run_ranks(refuse)


def test_ranks_communicates_tensors_that_nccl_takes() -> None:
    for rank, (found, _) in enumerate(run_ranks(communicate)):
        assert found == {
            "own": [1, 1, 1],
            "sum": [3, 10],
            "sum on the device": [[1, 1], [1, 1]],
            "max": [1],
            "any": True,
            "gather": [torch.tensor([0]), torch.tensor([1])],
            "exchange": [f"{other} to {rank}" for other in range(2)],
            "objects": ([0, 1], {"rank": 0}),
            "collectives": {"allreduce_", "alltoall_base_"},
        }
