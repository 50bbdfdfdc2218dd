"""Runs a collective function on several ranks, one thread each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from rl_plugins.stages.dealing import Table
from rl_plugins.tests.patience import patient

Collective = Callable[[Tensor], Tensor]


def meet_on_ranks(num_ranks: int, function: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """`function(rank, everyones)` of every rank; `everyones(x)` gives the x of all ranks, in their order.

    What a rank raises ends all ranks and is raised here. Ranks that call `everyones` unequally often raise
    BrokenBarrierError.
    """
    barrier = Barrier(num_ranks, timeout=patient(20))
    slots: list[Any] = [None] * num_ranks

    def one(rank: int) -> Any:
        def everyones(mine: Any) -> list[Any]:
            slots[rank] = mine
            barrier.wait()
            all_of_them = list(slots)
            barrier.wait()
            return all_of_them

        with ExitStack() as on_error:
            on_error.callback(barrier.abort)
            result = function(rank, everyones)
            on_error.pop_all()
        return result

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(num_ranks)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # The ranks that waited for the one that failed say no more than that.
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def run_on_ranks(num_ranks: int, function: Callable[[int, Collective, Collective], Any]) -> list[Any]:
    """`function(rank, sum_over_ranks, gather_over_ranks)` of every rank."""

    def one(rank: int, everyones: Callable[[Any], list[Any]]) -> Any:
        return function(
            rank,
            lambda values: torch.stack(everyones(values)).sum(dim=0),
            lambda values: torch.cat(everyones(values)),
        )

    return meet_on_ranks(num_ranks, one)


def sit_at_table(num_ranks: int, function: Callable[[Table], Any]) -> list[Any]:
    """`function(table)` of every rank."""

    def one(rank: int, everyones: Callable[[Any], list[Any]]) -> Any:
        def exchange(parcels: list[Any]) -> list[Any]:
            return [theirs[rank] for theirs in everyones(parcels)]

        return function(Table(rank, num_ranks, everyones, exchange))

    return meet_on_ranks(num_ranks, one)
