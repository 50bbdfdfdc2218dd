"""Stretches of a packed row, for the attention `packed_sdpa`.

Samples of a row may share a prompt. The prompt is in the row once, before the response of its first sample. The
responses of the other samples follow, and their positions continue from the end of the prompt. The model then computes
the prompt once. A stretch of the row is a run of consecutive positions: a whole sample, or a response after a shared
prompt. The tokens of a stretch are queries, and the tokens of the stretch's whole sample are keys.

Axes: `M` tokens of the row, `F` tokens of all whole samples, `N` stretches of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Places(NamedTuple):
    """Places of the tokens in a row with shared prompts.

    Attributes:
        queries: Index in the row of each token of the stretches [M].
        keys: Index in the row of each token of the whole samples [F].
        row: Index in the stretches of each token of the row [M].
    """

    queries: Tensor
    keys: Tensor
    row: Tensor


@dataclass(frozen=True)
class Stretches:
    """Stretches of a row, made once for a forward pass, so that no layer waits for the GPU to read a length.

    Attributes:
        runs: Number of queries of a stretch, number of keys, and number of neighbouring stretches with these numbers.
        starts: Starts of the stretches among queries and among keys, and the ends of the last stretch, int32 on the
            row's device [N + 1].
        places: Places of queries and keys. None if every stretch is a whole sample, in the order of the row.
    """

    runs: tuple[tuple[int, int, int], ...]
    starts: tuple[Tensor, Tensor]
    places: _Places | None = None

    @classmethod
    def of_lengths(cls, own_N: Tensor, whole_N: Tensor, places: _Places | None = None) -> Stretches:
        """Make the record of stretches with `own_N` queries and `whole_N` keys."""
        pairs = torch.stack([own_N, whole_N], dim=1).tolist()
        runs = tuple((own, whole, len(list(same))) for (own, whole), same in groupby(pairs))
        starts = (nn.functional.pad(lengths_N.cumsum(0, dtype=torch.int32), (1, 0)) for lengths_N in (own_N, whole_N))
        return cls(runs, (next(starts), next(starts)), places)

    @property
    def longest(self) -> tuple[int, int]:
        """Largest numbers of queries and of keys of a stretch."""
        return max(own for own, _, _ in self.runs), max(whole for _, whole, _ in self.runs)


def boundaries(positions_M: Tensor) -> dict[str, Stretches]:
    """Return the argument of `packed_sdpa` for a row.

    A stretch whose positions start at p > 0 continues after the first p tokens of the last stretch that starts at 0.

    Args:
        positions_M: Position of each token in its sample.
    """
    starts = starts_of(positions_M)
    begin_N, own_N = starts[:-1], starts.diff()
    shared_N = positions_M[begin_N]
    if not bool(shared_N.any()):
        return {"stretches": Stretches.of_lengths(own_N, own_N)}
    first_N = torch.where(shared_N == 0, torch.arange(len(own_N), device=starts.device), 0).cummax(dim=0).values
    whole_N = shared_N + own_N
    # Stretches of the same lengths are sorted next to each other, to run together.
    order_N = (whole_N * len(positions_M) + own_N).argsort(stable=True)
    begin_N, own_N, whole_N, shared_N, prompt_N = (
        values[order_N] for values in (begin_N, own_N, whole_N, shared_N, begin_N[first_N])
    )
    queries_M = _counts(own_N) + begin_N.repeat_interleave(own_N)
    nth_F = _counts(whole_N)
    in_prompt_F = nth_F < shared_N.repeat_interleave(whole_N)
    from_own_F, from_prompt_F = torch.stack([begin_N - shared_N, prompt_N]).repeat_interleave(whole_N, dim=1)
    keys_F = nth_F + torch.where(in_prompt_F, from_prompt_F, from_own_F)
    places = _Places(queries_M, keys_F, queries_M.argsort())
    return {"stretches": Stretches.of_lengths(own_N, whole_N, places)}


def _counts(lengths_N: Tensor) -> Tensor:
    """Count 0, 1, ... up to each length, and join the counts in one tensor."""
    counts = torch.arange(int(lengths_N.sum()), device=lengths_N.device)
    return counts - (lengths_N.cumsum(dim=0) - lengths_N).repeat_interleave(lengths_N)


def starts_of(positions_M: Tensor) -> Tensor:
    """Return the start of each stretch of consecutive positions, and the end of the last stretch [N + 1]."""
    begins_M = positions_M.diff(prepend=positions_M[:1]) != 1
    return nn.functional.pad(begins_M.nonzero().flatten(), (0, 1), value=len(positions_M))
