"""Memory that strategies give up is the GPU's again."""

from __future__ import annotations

import torch

from integration_tests.gpu import NEEDS_CUDA
from rl_plugins.strategies.memory import HostMemory

pytestmark = NEEDS_CUDA


def test_taken_memory_is_free_for_other_processes_and_comes_back_in_place() -> None:
    whole = torch.arange(2**26, device="cuda", dtype=torch.float32)
    part = whole[1000:2000].view(10, 100)
    memory = HostMemory()
    assert memory.nbytes([part, whole]) == whole.nbytes
    for _ in range(2):
        free = torch.cuda.mem_get_info()[0]
        memory.take([part, whole])
        assert torch.cuda.mem_get_info()[0] - free >= 0.9 * whole.nbytes
        memory.give_back()
        assert part[3, 5].item() == 1305 and whole[2**20].item() == 2**20
