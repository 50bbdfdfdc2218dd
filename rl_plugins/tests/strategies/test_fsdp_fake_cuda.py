"""FSDP2 with shards in host memory on CUDA: collectives are on the device, and no operation mixes the devices.

The tensors have a device and no numbers (`FakeTensorMode`), and the process group communicates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_plugins.models.muon import MuonAndAdamW
from rl_plugins.strategies.fsdp import Meshes, clip_gradients, shard
from rl_plugins.strategies.fsdp_shards import send_shards, take_tensors
from rl_plugins.strategies.optimizers import optimizer_states
from rl_plugins.strategies.weight_sources import FSDPWeightSource
from rl_plugins.tests.fake_cuda import CUDA
from rl_plugins.tests.nccl_tensors import NcclTensors


class FakeRanks(NamedTuple):
    """Two ranks with fake devices.

    Attributes:
        mesh: mesh of the ranks.
        sent: devices of rank 0's broadcasts.
        nccl: checks of all collectives.
    """

    mesh: DeviceMesh
    sent: list[torch.device]
    nccl: NcclTensors


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRanks]:
    devices: list[torch.device] = []
    nccl = NcclTensors()

    def broadcast(tensor: Tensor, src: int) -> None:
        nccl.check("broadcast", tensor)
        devices.append(tensor.device)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: CUDA.index)
    # The broadcast of torch would ask for the properties of the GPU.
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cuda", (2,))
    with FakeTensorMode(), nccl:
        yield FakeRanks(mesh, devices, nccl)
    torch.distributed.destroy_process_group()


def model_on_host(mesh: DeviceMesh) -> nn.Module:
    """A model with a buffer and a tied weight, whose shards are in host memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.append(model[0])
    whole = take_tensors(model)
    shard(model, Meshes(mesh, mesh), MixedPrecisionPolicy(), CPUOffloadPolicy(pin_memory=False))
    send_shards(model, whole, CUDA, on_host=True)
    assert whole == {}
    return model


def test_send_shards_keeps_shards_in_host_memory_and_buffers_on_the_device(ranks: FakeRanks) -> None:
    model = model_on_host(ranks.mesh)
    parameters, buffers = list(model.parameters()), list(model.buffers())
    assert model[0].weight is model[2].weight  # type: ignore[index]
    assert {parameter.device.type for parameter in parameters} == {"cpu"}
    assert {buffer.device for buffer in buffers} == {CUDA}
    assert ranks.sent == [CUDA] * (len(parameters) + len(buffers))


def test_weights_in_host_memory_are_gathered_on_the_device(ranks: FakeRanks) -> None:
    model = model_on_host(ranks.mesh)
    weights = dict(FSDPWeightSource(model, torch.bfloat16))
    assert list(weights) == [name for name, _ in model.named_parameters()]
    assert {(weight.device, weight.dtype) for weight in weights.values()} == {(CUDA, torch.bfloat16)}
    assert set(ranks.nccl.collectives) == {"all_gather_into_tensor"}


def test_gradients_in_host_memory_are_clipped_by_a_norm_of_the_device(
    ranks: FakeRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = list(model_on_host(ranks.mesh).parameters())
    norms: list[torch.device] = []

    def to_float(tensor: Tensor) -> float:
        norms.append(tensor.device)
        return 0.0

    monkeypatch.setattr(torch.Tensor, "__float__", to_float)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    clip_gradients(parameters, 1.0)
    assert norms == [CUDA]
    assert set(ranks.nccl.collectives) == {"all_reduce"}
    assert {parameter.grad.device.type for parameter in parameters if parameter.grad is not None} == {"cpu"}


def test_muon_exchanges_updates_in_host_memory_on_the_device(ranks: FakeRanks) -> None:
    model = model_on_host(ranks.mesh)
    optimizer = MuonAndAdamW(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert ranks.nccl.collectives == ["alltoall_base_"] * 2
    tensors = [*model.parameters(), *optimizer_states(optimizer)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
