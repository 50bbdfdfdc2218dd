"""Weight updates over CUDA IPC and NCCL: vLLM's own code on both sides, on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.cuda_transport import SeveralEngines, make_cuda_sender
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.rollout.cuda_stubs import StubEngine, cuda_on_cpu, on_gpu
from rl_plugins.weights.source import ModuleWeightSource

GPUS = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


@pytest.fixture
def communicators() -> Iterator[list[Any]]:
    with cuda_on_cpu() as communicators:
        yield communicators


def make_policy() -> torch.nn.Module:
    """A policy with an embedding of 1.2 MB, in two dtypes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(600, 512), torch.nn.Linear(512, 96), torch.nn.LayerNorm(96))
    model[1].bfloat16()
    return model


def config_of(backend: str, **settings: Any) -> VLLMConfig:
    return VLLMConfig("model", device="cuda", transport=backend, bucket_mb=1, **settings)


def update_calls(chunks: int) -> list[str]:
    """Return the calls of a weight update in their order."""
    return ["start_weight_update", *["update_weights"] * chunks, "finish_weight_update", "set_policy_version"]


def assert_has_weights(engine: StubEngine, policy: torch.nn.Module, version: int) -> None:
    for worker in engine.workers:
        weights = worker.model.weights()
        for name, parameter in policy.named_parameters():
            assert torch.equal(weights[name], parameter), f"{name} on {worker.gpu}"
    assert engine.version == version


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
@pytest.mark.usefixtures("communicators")
def test_make_cuda_sender_gives_an_engine_the_weights_of_each_update(backend: str) -> None:
    policy = make_policy()
    engine = StubEngine(backend, GPUS[:1], policy)
    addresses = {name: weight.data_ptr() for name, weight in engine.workers[0].model.weights().items()}
    with on_gpu(GPUS[0]):
        send = make_cuda_sender(config_of(backend), ModuleWeightSource(policy), client=engine, rank=0)
        send(1)
        assert_has_weights(engine, policy, 1)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(1)
        send(2)
    assert_has_weights(engine, policy, 2)
    # CUDA graphs replay addresses.
    assert addresses == {name: weight.data_ptr() for name, weight in engine.workers[0].model.weights().items()}
    update = update_calls(2 if backend == "ipc" else 1)
    assert engine.calls == ["init_weight_transfer_engine", *update, *update]


def test_several_engines_over_nccl_have_separate_ranks(communicators: list[Any]) -> None:
    policy = make_policy()
    engines = [StubEngine("nccl", GPUS[:2], policy), StubEngine("nccl", GPUS[2:], policy)]
    config = config_of("nccl", tensor_parallel_size=2)
    with on_gpu("GPU-trainer"):
        client = SeveralEngines(engines, 2)
        send = make_cuda_sender(config, ModuleWeightSource(policy), client=client, rank=0, num_engines=2)
        send(7)
    assert sorted(communicator.rank for communicator in communicators) == [0, 1, 2, 3, 4]
    for engine in engines:
        assert_has_weights(engine, policy, 7)
        assert engine.calls == ["init_weight_transfer_engine", *update_calls(1)]


def _send_over_ipc(rank: int, workers: list[list[str]]) -> list[list[str]]:
    """Send the weights from this rank on its GPU; return the calls of each engine.

    Args:
        rank: number of this rank.
        workers: GPU of each worker of each engine.
    """
    policy = make_policy()
    with cuda_on_cpu(), on_gpu(GPUS[rank]):
        # Rank 0 alone calls engines.
        engines = [StubEngine("ipc", gpus, policy) for gpus in workers] if rank == 0 else []
        config = config_of("ipc", tensor_parallel_size=len(workers[0]))
        client = SeveralEngines(engines, len(workers[0]))
        send = make_cuda_sender(config, ModuleWeightSource(policy), client=client, rank=rank, num_engines=len(workers))
        send(4)
        for engine in engines:
            assert_has_weights(engine, policy, 4)
        return [engine.calls for engine in engines]


@pytest.mark.parametrize("workers", [[GPUS[:2]], [GPUS[:1], GPUS[1:2]]], ids=["one engine", "two engines"])
def test_make_cuda_sender_over_ipc_gives_each_worker_memory_of_the_same_gpu(workers: list[list[str]]) -> None:
    (calls, _), _ = run_ranks(_send_over_ipc, workers)
    assert calls == [["init_weight_transfer_engine", *update_calls(2)]] * len(workers)
