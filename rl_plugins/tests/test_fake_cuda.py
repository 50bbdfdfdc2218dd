"""FakeCuda raises where a GPU would, and counts the waits of the host."""

from __future__ import annotations

import pytest
import torch

from rl_plugins.tests.fake_cuda import FakeCuda


def test_fake_cuda_raises_for_tensors_of_both_devices() -> None:
    with FakeCuda():
        gpu, cpu = torch.ones(3, device="cuda", requires_grad=True), torch.ones(3)
        for mixed in (
            lambda: gpu + cpu,
            lambda: torch.cat([gpu, cpu]),
            lambda: gpu.gather(0, torch.zeros(1, dtype=torch.long)),
            lambda: gpu.detach().add_(cpu),
            lambda: (gpu * torch.arange(3.0)).sum().backward(),
        ):
            with pytest.raises(RuntimeError, match="same device, but found cuda:0 and cpu"):
                mixed()
        with pytest.raises(TypeError, match="cuda:0"):
            gpu.detach().numpy()


def test_fake_cuda_keeps_devices_through_operations_gradients_and_moves() -> None:
    with FakeCuda():
        gpu, cpu = torch.ones(3, device="cuda:0", requires_grad=True), torch.ones(3)
        for on_gpu in (
            gpu[1:],
            gpu * 2,
            gpu.new_zeros(2),
            torch.zeros_like(gpu),
            cpu.to(gpu),
            cpu.cuda(),
            gpu + cpu[0],
        ):
            assert on_gpu.device == torch.device("cuda", 0) and on_gpu.is_cuda
        for on_cpu in (cpu, gpu.cpu(), gpu.detach().to("cpu", torch.float64), torch.tensor([1]), cpu.to(torch.int32)):
            assert on_cpu.device.type == "cpu" and not on_cpu.is_cuda
        linear = torch.nn.Linear(3, 2).to("cuda")
        linear(gpu).square().sum().backward()
        assert gpu.grad is not None and linear.weight.grad is not None
        assert gpu.grad.is_cuda and linear.weight.grad.is_cuda
    assert gpu.device.type == "cpu"


def test_fake_cuda_counts_where_the_host_waits() -> None:
    with FakeCuda() as fake:
        gpu, cpu = torch.ones(3, device="cuda"), torch.ones(3)
        for waiting in (
            gpu.tolist,
            gpu.cpu,
            gpu.nonzero,
            lambda: float(gpu.sum()),
            lambda: bool(gpu.any()),
            lambda: gpu[gpu > 0],
            lambda: torch.arange(3, device="cuda").repeat_interleave(gpu.long()),
            lambda: gpu[torch.tensor([0, 1])],
            lambda: torch.tensor([1], device="cuda"),
            lambda: gpu.new_tensor(1),
            lambda: cpu.to("cuda"),
            lambda: cpu.to("cuda", non_blocking=True),
            lambda: cpu.pin_memory().to("cuda"),
        ):
            fake.waits.clear()
            waiting()
            assert fake.waits
        fake.waits.clear()
        assert cpu.pin_memory().to("cuda", non_blocking=True).is_cuda
        assert not gpu.to("cpu", non_blocking=True).is_cuda
        assert cpu.tolist() and float(cpu.sum()) and gpu.sum().shape == () and len(gpu.sort().values) == 3
        assert fake.waits == []
