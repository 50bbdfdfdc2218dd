"""Copies to a GPU join the queue of the GPU."""

from __future__ import annotations

import torch

from rl_plugins.device_copies import to_device
from rl_plugins.tests.fake_cuda import CUDA, FakeCuda
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.samples import batch_of, random_samples


@for_each("device", ["cuda", CUDA])
def test_to_device_copies_to_a_gpu_without_a_wait(device: torch.device | str) -> None:
    tensor, samples = torch.arange(3), batch_of(random_samples((2, 3), (1, 2)))
    with FakeCuda() as gpu:
        copied, again = to_device(tensor, device), to_device(to_device(tensor, device), device)
        assert {copied.device, again.device} == {CUDA}
        on_gpu = to_device(samples, device)
        assert on_gpu.responses.device == on_gpu.prompts.device == CUDA and samples.responses.device.type == "cpu"
        assert gpu.waits == []
        assert copied.tolist() == again.tolist() == tensor.tolist()
        assert torch.equal(on_gpu.responses.cpu(), samples.responses)


def test_to_device_copies_nothing_on_the_host() -> None:
    tensor = torch.arange(3)
    assert to_device(tensor, "cpu") is tensor
