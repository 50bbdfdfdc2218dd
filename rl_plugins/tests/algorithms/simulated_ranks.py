"""Runs a collective function on several ranks, one thread each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

Collective = Callable[[Tensor], Tensor]


def run_on_ranks(num_ranks: int, function: Callable[[int, Collective, Collective], Any]) -> list[Any]:
    """`function(rank, sum_over_ranks, gather_over_ranks)` of every rank; a rank that skips a collective times out."""
    barrier = Barrier(num_ranks, timeout=10)
    slots: list[Tensor] = [torch.empty(0)] * num_ranks

    def exchange(rank: int, values: Tensor) -> list[Tensor]:
        slots[rank] = values
        barrier.wait()
        everyone = list(slots)
        barrier.wait()
        return everyone

    def one(rank: int) -> Any:
        return function(
            rank,
            lambda values: torch.stack(exchange(rank, values)).sum(dim=0),
            lambda values: torch.cat(exchange(rank, values)),
        )

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks)))
