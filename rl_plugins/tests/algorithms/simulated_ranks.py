"""Runs of a collective function on several ranks, one thread each."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Barrier, BrokenBarrierError
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from rl_plugins.ranks import Ranks
from rl_plugins.tests.patience import patient

Collective = Callable[[Tensor], Tensor]
T = TypeVar("T")


def run_with_all_gather(num_ranks: int, function: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """Call `function(rank, all_gather)` for every rank; `all_gather(x)` returns the x of all ranks, in rank order.

    An error of one rank ends all ranks and is raised here. When a rank calls `all_gather` less often than the other
    ranks, this raises BrokenBarrierError.
    """
    barrier = Barrier(num_ranks, timeout=patient(20))
    slots: list[Any] = [None] * num_ranks

    def on_rank(rank: int) -> Any:
        def all_gather(value: Any) -> list[Any]:
            slots[rank] = value
            barrier.wait()
            gathered = list(slots)
            barrier.wait()
            return gathered

        with ExitStack() as on_error:
            on_error.callback(barrier.abort)
            result = function(rank, all_gather)
            on_error.pop_all()
        return result

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(on_rank, rank) for rank in range(num_ranks)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    # A rank that waited for the failed rank raises BrokenBarrierError: the error of the failed rank says more.
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


def run_on_ranks(num_ranks: int, function: Callable[[int, Collective, Collective], Any]) -> list[Any]:
    """Call `function(rank, sum_over_ranks, gather_over_ranks)` for every rank."""

    def on_rank(rank: int, all_gather: Callable[[Any], list[Any]]) -> Any:
        return function(
            rank,
            lambda values: torch.stack(all_gather(values)).sum(dim=0),
            lambda values: torch.cat(all_gather(values)),
        )

    return run_with_all_gather(num_ranks, on_rank)


@dataclass(frozen=True)
class SimulatedRanks(Ranks):
    """A rank in a thread."""

    all_gather: Callable[[Any], list[Any]] = lambda value: [value]

    @override
    def gather(self, value: T) -> list[T]:
        return self.all_gather(value)

    @override
    def exchange(self, parcels: list[T]) -> list[T]:
        return [sent[self.rank] for sent in self.all_gather(parcels)]


def run_with_ranks(num_ranks: int, function: Callable[[SimulatedRanks], Any]) -> list[Any]:
    """Call `function(ranks)` for every rank."""

    def on_rank(rank: int, all_gather: Callable[[Any], list[Any]]) -> Any:
        return function(SimulatedRanks(rank, num_ranks, all_gather=all_gather))

    return run_with_all_gather(num_ranks, on_rank)
