"""Section `host_memory`: GB/s of the copies to the host and back, and the memory that is free in between."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from integration_tests.gpu.without_vllm.cases import Case, Place, wait_for_gpu
from rl_plugins.strategies.memory import HostMemory

_ROUNDS = 3


def cases(place: Place) -> Iterable[Case]:
    """Return a case for each size."""
    sizes = (2**28, 2**30, 5 * 2**30) if place.on_gpu else (2**20,)
    return [Case(f"{size // 2**20} MiB", partial(move, place, size)) for size in sizes]


def move(place: Place, size: int) -> Mapping[str, Any]:
    """Move a storage with two tensors to the host and back.

    Returns:
        GB/s. The first round also makes the buffer on the host.

    Raises:
        AssertionError: the memory is not free for other processes, or the values change.
    """
    whole = torch.arange(size // 4, device=place.device, dtype=torch.float32)
    part = whole[1000:2000].view(10, 100)
    memory = HostMemory(place.device)
    assert memory.nbytes([part, whole]) == whole.nbytes
    out, back = [], []
    for _ in range(_ROUNDS):
        free = _free(place)
        start = time.perf_counter()
        memory.move_to_host([part, whole])
        taken = time.perf_counter()
        assert _free(place) - free >= (0.9 * whole.nbytes if place.on_gpu else 0)
        resumed = time.perf_counter()
        memory.move_back()
        memory.wait()
        wait_for_gpu(place)
        out.append(whole.nbytes / (taken - start) / 1e9)
        back.append(whole.nbytes / (time.perf_counter() - resumed) / 1e9)
        assert part[3, 5].item() == 1305 and whole[200_000].item() == 200_000
    return {"first_gb_per_s": out[0], "to_host_gb_per_s": max(out[1:]), "to_device_gb_per_s": max(back)}


def _free(place: Place) -> int:
    return torch.cuda.mem_get_info()[0] if place.on_gpu else 0
