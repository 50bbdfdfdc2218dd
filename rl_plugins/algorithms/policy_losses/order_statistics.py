"""The k-th largest or smallest value of all ranks, from tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""From this rank's values [N], N different on each rank, to those of all ranks in one vector. Collective."""


def own_values(values_N: Tensor) -> Tensor:
    """`gather_over_ranks` where there is one rank."""
    return values_N


def largest(values_N: Tensor, count: int, gather_over_ranks: Gather) -> Tensor:
    """The `count` largest values of all ranks, or all if there are fewer, in descending order. Collective.

    No rank sends more than `count` values.
    """
    own_N = values_N.topk(min(count, len(values_N))).values
    all_N = gather_over_ranks(own_N)
    return all_N.topk(min(count, len(all_N))).values


def stable_hash(ids_B: Tensor, length: int, seed: int) -> Tensor:
    """A pseudo-random int64 for each position of each sample, [B, length], from nothing but seed, id and position.

    So a choice by these numbers does not depend on where a sample lies, nor on its neighbours.

    Source: splitmix64's finalizer, https://doi.org/10.1145/2660193.2660195.
    """
    seed_hash = _mix(torch.tensor(_signed(seed), dtype=torch.int64, device=ids_B.device))
    sample_hash_B = _mix(ids_B.long() ^ seed_hash)
    positions_T = torch.arange(1, length + 1, device=ids_B.device) * _GOLDEN
    return _mix(sample_hash_B[:, None] + positions_T)


def _signed(value: int) -> int:
    """The int64 with the same lowest 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _mix(bits: Tensor) -> Tensor:
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Shift to the right, filled with zeros: torch's own copies the sign."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)
