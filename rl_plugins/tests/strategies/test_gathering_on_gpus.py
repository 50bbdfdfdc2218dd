"""Groups of two ranks with a fake GPU each: the exchanges of their rows have only tensors that NCCL takes."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import init_device_mesh

from rl_plugins.models import packed_attention
from rl_plugins.strategies.sequence_parallel import SequenceShards, exchange
from rl_plugins.strategies.tensor_parallel import GroupBatch
from rl_plugins.tests.fake_cuda import CUDA, FakeCuda
from rl_plugins.tests.models.plain_varlen import plain_varlen
from rl_plugins.tests.nccl_tensors import NcclTensors
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.strategies.test_sequence_parallel import model_of, padded_of, row_of, run

# Samples of each rank: another number of tokens, and another padding.
LENGTHS = [[3, 6], [2, 1]]
KEYS = {"num_key_value_heads": 2}


def pass_rows(rank: int, layout: Literal["sequence_parallel", "tensor_parallel"]) -> Counter[str]:
    """Run rows and padded batches of a group forward and backward; return the number of each collective."""
    with plain_varlen(), FakeCuda() as gpu:
        model = model_of(**KEYS).to(CUDA)
        if layout == "sequence_parallel":
            SequenceShards(model, "policy", None)
        else:
            GroupBatch(model, init_device_mesh("cpu", (2,)))
        rows = [on_gpu(row_of(LENGTHS[rank])), on_gpu(row_of(LENGTHS[rank], [0, 2]))]
        with NcclTensors(gpu.device_of) as nccl:
            for inputs in (*rows, on_gpu(padded_of(LENGTHS[rank]))):
                assert run(model, inputs).device == CUDA
        assert all(parameter.grad is not None and parameter.grad.is_cuda for parameter in model.parameters())
        return Counter(nccl.collectives)


def on_gpu(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a pass on the fake GPU, with the places of stretches that belong to the row."""
    moved = {name: tensor.to(CUDA) for name, tensor in inputs.items() if name != "stretches"}
    return {**moved, **packed_attention.boundaries(moved["position_ids"][0])} if "stretches" in inputs else moved


def test_sequence_shards_exchange_tensors_that_nccl_takes() -> None:
    for found, _ in run_ranks(pass_rows, "sequence_parallel"):
        # Two layers with an exchange before and after attention, and an exchange behind the body, in both directions.
        assert found["alltoall_base_"] == 3 * 2 * 5 and found["allgather_"] == 3 * 2


def test_group_batch_joins_tensors_that_nccl_takes() -> None:
    for found, _ in run_ranks(pass_rows, "tensor_parallel"):
        assert set(found) == {"allgather_"}


def exchange_with_gaps(rank: int) -> tuple[Any, Any]:
    """Exchange columns of a matrix; return the received columns, and the gradient of the matrix."""
    with FakeCuda() as gpu, NcclTensors(gpu.device_of):
        own = (torch.arange(6.0, device=CUDA).view(3, 2) + 10 * rank).requires_grad_()
        received = exchange(own.T, [1, 1], [1, 1], None)
        weights = torch.arange(6.0, device=CUDA).view(3, 2).T
        (gradient,) = torch.autograd.grad(received, own, weights)
        return received.detach().cpu().tolist(), gradient.cpu().tolist()


def test_exchange_of_tensors_with_gaps_sends_tensors_that_nccl_takes() -> None:
    for rank, ((received, gradient), _) in enumerate(run_ranks(exchange_with_gaps)):
        assert received == [[sender * 10 + row * 2 + rank for row in range(3)] for sender in range(2)]
        # Each rank weighs what it gets from a rank by the same column.
        assert gradient == [[row * 2.0 + rank] * 2 for row in range(3)]
