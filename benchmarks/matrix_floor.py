"""The least time that an RL step can take on a processor: its matrix products, at the rate of large ones."""

from __future__ import annotations

import os
import time

from rl_plugins.planning.rows import rows_of
from rl_plugins.planning.workload import Workload

_ROWS = 1536


def matrix_rate(dtype_name: str, hidden: int, intermediate: int) -> float:
    """Operations a second of all cores in products of the shapes of a model's MLP, the best of several tries."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    dtype = getattr(torch, dtype_name)
    states, weights = torch.randn(_ROWS, hidden).to(dtype), torch.randn(intermediate, hidden).to(dtype)
    best = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(10):
            torch.nn.functional.linear(states, weights)
        best = min(best, time.perf_counter() - start)
    return 10 * 2 * _ROWS * hidden * intermediate / best


def step_floor_s(work: Workload, rate: float) -> float:
    """Seconds of the products of a step: every response token forwards once, every token trained forwards and back.

    Prompts are read once for all their samples, when sampling and when training.
    """
    shape, sampled = work.policy, work.responses * work.response_tokens
    sampling = shape.forward_flops(sampled, work.prompt_tokens + work.response_tokens / 2)
    sampling += shape.forward_flops(work.prompts * work.prompt_tokens, work.prompt_tokens / 2)
    rows = rows_of(work, 1)
    training = 3 * shape.forward_flops(rows.tokens, rows.context)
    return (sampling + training) / rate
