"""Section `adamw`: an optimizer step by the fused kernel, as in training, and by kernels for lists of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from integration_tests.gpu.without_vllm.cases import Case, Place, seconds_of

_KERNELS = ("fused", "foreach")
_LARGEST = 500_000_000
# Parameter, gradient, two states, and temporaries of the kernels for lists.
_BYTES = 32


def cases(place: Place) -> Iterable[Case]:
    """Return a case for each kernel, and a comparison."""
    for kernel in _KERNELS:
        yield Case(kernel, partial(step, place, kernel))
    yield Case("same weights", lambda: compare(place))


def step(place: Place, kernel: str) -> Mapping[str, Any]:
    """Return milliseconds of a step, and the peak of the memory in GiB."""
    count = min(_LARGEST, torch.cuda.mem_get_info()[0] // _BYTES) if place.on_gpu else 10_000
    parameter, optimizer = _optimizer(place, count, kernel)
    parameter.grad = torch.ones_like(parameter)
    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(place, optimizer.step)
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if place.on_gpu else {}
    return {"elements": count, "ms": 1e3 * seconds, **peak}


def compare(place: Place) -> Mapping[str, Any]:
    """Compare the weights after three steps."""
    weights = []
    for kernel in _KERNELS:
        parameter, optimizer = _optimizer(place, 10_000, kernel)
        for number in range(3):
            parameter.grad = torch.linspace(-1, 1, 10_000, device=place.device) ** (number + 1)
            optimizer.step()
        weights.append(parameter.detach())
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-7)
    return {"largest_difference": float((weights[0] - weights[1]).abs().max())}


def _optimizer(place: Place, count: int, kernel: str) -> tuple[torch.nn.Parameter, torch.optim.AdamW]:
    parameter = torch.nn.Parameter(torch.ones(count, device=place.device))
    return parameter, torch.optim.AdamW([parameter], lr=1e-3, fused=kernel == "fused", foreach=kernel == "foreach")
