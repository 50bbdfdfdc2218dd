"""Moves of samples between ranks: samples of all ranks are chosen, and distributed for even work.

An algorithm may choose among the samples of all ranks (dynamic sampling, resampling). Chosen samples are distributed in
the order of the prompts in the global batch, so the mini-batches of a step are the same sets of samples for any number
of ranks. Inside each mini-batch, all ranks get about the same number of tokens, because ranks meet in every forward
pass and wait for the rank with the longest responses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rl_plugins.algorithms.filtering import Resampling, resample, resampling_weights
from rl_plugins.data.experience import Experience
from rl_plugins.ranks import Ranks

T = TypeVar("T")

_WORTH_MOVING = 0.95
"""Samples move only if this makes the largest number of tokens on a rank smaller than this share of it."""


class SampleSet(NamedTuple):
    """Samples of one rank; the samples of a set stay together.

    Attributes:
        key: sorts the sets of all ranks; unique.
        owner: rank of the samples.
        number: index of the set on the owner.
        size: number of samples.
        tokens: number of tokens of all samples.
    """

    key: tuple[int, ...]
    owner: int
    number: int
    size: int
    tokens: int


def gather_sets(keys: Sequence[tuple[int, ...]], size: int, tokens: Sequence[int], ranks: Ranks) -> list[SampleSet]:
    """Return the sets of all ranks, sorted by key, given keys and tokens of this rank's sets. Collective."""
    gathered = ranks.gather(list(zip(keys, tokens, strict=True)))
    return sorted(
        SampleSet(key, owner, number, size, count)
        for owner, sets in enumerate(gathered)
        for number, (key, count) in enumerate(sets)
    )


def even_order(chosen: Sequence[SampleSet], mini_batches: int, world_size: int) -> list[SampleSet]:
    """Return an order in which ranks get about the same number of tokens of each mini-batch, if ranks take turns.

    Args:
        chosen: sets in the order in which mini-batches take them; the number of ranks divides their number.
        mini_batches: number of mini-batches of a rank.
        world_size: number of ranks.
    """
    sets_per_rank = len(chosen) // world_size
    size = -(-sets_per_rank // mini_batches) * world_size
    ordered: list[SampleSet] = []
    for start in range(0, len(chosen), size):
        shares = even_shares(chosen[start : start + size], world_size)
        ordered += [sample_set for turn in zip(*shares, strict=True) for sample_set in turn]
    return ordered


def even_shares(sets: Sequence[SampleSet], world_size: int) -> list[list[SampleSet]]:
    """Return the sets of each rank: equally many sets, with about the same number of tokens.

    The longest set goes first, always to the rank with the fewest tokens. The sets stay in place if moving saves
    less than a twentieth of the tokens of the rank with the most, because moving takes time, too. Each share is in the
    order of `sets`.
    """
    sets_per_rank = len(sets) // world_size
    shares: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for place in sorted(range(len(sets)), key=lambda place: (-sets[place].tokens, place)):
        free = (rank for rank in range(world_size) if len(shares[rank]) < sets_per_rank)
        rank = min(free, key=tokens.__getitem__)
        shares[rank].append(place)
        tokens[rank] += sets[place].tokens
    unmoved = [[place for place, one in enumerate(sets) if one.owner == rank] for rank in range(world_size)]
    if all(len(share) == sets_per_rank for share in unmoved):
        most = max(sum(sets[place].tokens for place in share) for share in unmoved)
        if max(tokens) > _WORTH_MOVING * most:
            shares = unmoved
    return [[sets[place] for place in sorted(share)] for share in shares]


def redistribute_groups(groups: Sequence[T], ordered: Sequence[SampleSet], ranks: Ranks) -> list[T]:
    """Return the groups of this rank after the ranks took turns in an order of groups. Collective.

    Args:
        groups: groups of this rank.
        ordered: a set for each group of all ranks, equal on all ranks; the number of ranks divides their number.
        ranks: this rank and the others.
    """
    parcels = [
        [groups[one.number] for one in ordered[rank :: ranks.world_size] if one.owner == ranks.rank]
        for rank in range(ranks.world_size)
    ]
    received = [iter(parcel) for parcel in (ranks.exchange(parcels) if _any_moves(ordered, ranks) else parcels)]
    return [next(received[one.owner]) for one in ordered[ranks.rank :: ranks.world_size]]


def redistribute(
    samples: Experience, members: Sequence[Tensor], ordered: Sequence[SampleSet], ranks: Ranks
) -> Experience:
    """Return the samples of this rank after the ranks took turns in an order of sets. Collective.

    Args:
        samples: samples of this rank.
        members: indices of the samples of each of this rank's sets.
        ordered: sets, equal on all ranks; a set may appear several times; the number of ranks divides their number.
        ranks: this rank and the others.
    """
    parcels: list[Experience | None] = []
    for rank in range(ranks.world_size):
        own = [members[one.number] for one in ordered[rank :: ranks.world_size] if one.owner == ranks.rank]
        parcels.append(samples[torch.cat(own)].compact() if own else None)
    received = ranks.exchange(parcels) if _any_moves(ordered, ranks) else parcels
    # The samples of each sender have the order of `ordered`.
    next_row = list(accumulate((0 if parcel is None else len(parcel) for parcel in received), initial=0))
    rows = []
    for one in ordered[ranks.rank :: ranks.world_size]:
        rows.append(torch.arange(next_row[one.owner], next_row[one.owner] + one.size))
        next_row[one.owner] += one.size
    return Experience.concat([parcel for parcel in received if parcel is not None]).reorder(torch.cat(rows))


@dataclass
class GroupBuffer:
    """Kept groups of several draws of prompts.

    Args:
        ranks: this rank and the others.
        group_size: number of samples of a group.
    """

    ranks: Ranks
    group_size: int
    _parts: list[Experience] = field(default_factory=list)
    _keys: list[tuple[int, ...]] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)

    def add(self, samples: Experience, kept_B: Tensor, draw: int) -> list[SampleSet]:
        """Keep the marked groups of a draw; return all groups kept on all ranks. Collective."""
        self._parts.append(samples[kept_B])
        self._tokens += self._parts[-1].sequence_lengths.view(-1, self.group_size).sum(dim=1).tolist()
        places = kept_B[:: self.group_size].nonzero().flatten().tolist()
        self._keys += [(draw, place * self.ranks.world_size + self.ranks.rank) for place in places]
        return gather_sets(self._keys, self.group_size, self._tokens, self.ranks)

    def take(self, chosen: Sequence[SampleSet], mini_batches: int) -> Experience:
        """Return this rank's part of the chosen groups, for `mini_batches` mini-batches. Collective."""
        # A draw whose conversations all failed has no groups, and may lack columns.
        kept = Experience.concat([part for part in self._parts if len(part)] or self._parts[:1])
        ordered = even_order(chosen, mini_batches, self.ranks.world_size)
        return redistribute(kept, torch.arange(len(kept)).split(self.group_size), ordered, self.ranks)


def resample_over_ranks(
    samples: Experience, options: Resampling, group_size: int, mini_batches: int, seed: int, ranks: Ranks
) -> Experience:
    """Draw as many samples from the samples of all ranks, by score; return the samples if none is valid. Collective.

    Args:
        samples: samples of this rank, in groups.
        options: kind and power of the weights.
        group_size: number of samples of a group.
        mini_batches: number of mini-batches of a rank.
        seed: seed of the draw, equal on all ranks.
        ranks: this rank and the others.
    """
    assert samples.scores is not None
    places = range(len(samples))
    keys = [(i // group_size * ranks.world_size + ranks.rank, i % group_size) for i in places]
    sets = gather_sets(keys, 1, samples.sequence_lengths.tolist(), ranks)
    gathered = ranks.gather((samples.scores.double(), samples.valid))
    weights_B = resampling_weights(
        rewards_B=torch.stack([gathered[one.owner][0][one.number] for one in sets]),
        valid_B=torch.stack([gathered[one.owner][1][one.number] for one in sets]),
        kind=options.kind,
        power=options.power,
    )
    if not weights_B.any():
        return samples
    drawn = resample(weights_B=weights_B, generator=torch.Generator().manual_seed(seed)).tolist()
    ordered = even_order([sets[place] for place in drawn], mini_batches, ranks.world_size)
    return redistribute(samples, torch.arange(len(samples)).split(1), ordered, ranks)


def _any_moves(ordered: Sequence[SampleSet], ranks: Ranks) -> bool:
    return any(one.owner != place % ranks.world_size for place, one in enumerate(ordered))
