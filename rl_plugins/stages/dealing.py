"""Samples that change ranks: chosen from those of all ranks, and dealt to them in turn.

An algorithm may choose among the samples of all ranks (dynamic sampling, resampling). The order in which they are dealt
is that of the prompts in the global batch, so that the mini-batches of a step are the same sets of samples for any
number of ranks. Inside each mini-batch, groups then change ranks until all ranks have about as many tokens to train on:
ranks that meet in every forward pass are as slow as the one with the longest responses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.resampling import Resampling, resample, resampling_weights
from rl_plugins.data.experience import Experience

_WORTH_MOVING = 0.95


@dataclass(frozen=True)
class Table:
    """Where this rank sits.

    Attributes:
        rank: this one.
        world_size: number of ranks.
        gather: the value of every rank, in their order. Collective.
        exchange: gives item i of a list to rank i; returns what every rank gave to this one. Collective.
    """

    rank: int
    world_size: int
    gather: Callable[[Any], list[Any]]
    exchange: Callable[[list[Any]], list[Any]]


class Hand(NamedTuple):
    """Samples that stay together, known to all ranks.

    Attributes:
        key: sorts the hands of all ranks; unique.
        owner: the rank that has them.
        number: of the hand there.
        size: how many samples.
    """

    key: tuple[int, ...]
    owner: int
    number: int
    size: int


def all_hands(keys: Sequence[tuple[int, ...]], size: int, table: Table) -> list[Hand]:
    """The hands of all ranks, of `size` samples each, in the order of their keys, given this rank's. Collective."""
    told = table.gather(list(keys))
    return sorted(
        Hand(key, owner, number, size) for owner, theirs in enumerate(told) for number, key in enumerate(theirs)
    )


def deal(experience: Experience, hands: Sequence[Tensor], chosen: Sequence[Hand], table: Table) -> Experience:
    """What this rank gets when the chosen hands are dealt in turn. Collective.

    Args:
        experience: this rank's samples.
        hands: indices of the samples of each of this rank's hands.
        chosen: the same list on every rank; a hand may be there several times; the number of ranks divides its length.
        table: where this rank sits.
    """
    parcels: list[Any] = []
    for rank in range(table.world_size):
        own = [hands[hand.number] for hand in chosen[rank :: table.world_size] if hand.owner == table.rank]
        parcels.append(experience[torch.cat(own)].compact() if own else None)
    received = table.exchange(parcels)
    # Each rank's come in the order in which they were chosen.
    next_row = list(accumulate((0 if parcel is None else len(parcel) for parcel in received), initial=0))
    rows = []
    for hand in chosen[table.rank :: table.world_size]:
        rows.append(torch.arange(next_row[hand.owner], next_row[hand.owner] + hand.size))
        next_row[hand.owner] += hand.size
    return Experience.concat([parcel for parcel in received if parcel is not None]).reorder(torch.cat(rows))


@dataclass
class GroupBuffer:
    """Groups that were kept from several draws of prompts.

    Args:
        table: where this rank sits.
        group_size: samples of a group.
    """

    table: Table
    group_size: int
    _parts: list[Experience] = field(default_factory=list)
    _keys: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, experience: Experience, kept_B: Tensor, draw: int) -> list[Hand]:
        """Keep the groups of a draw that are marked; returns all that are kept on all ranks. Collective."""
        self._parts.append(experience[kept_B])
        places = kept_B[:: self.group_size].nonzero().flatten().tolist()
        self._keys += [(draw, place * self.table.world_size + self.table.rank) for place in places]
        return all_hands(self._keys, self.group_size, self.table)

    def take(self, chosen: Sequence[Hand]) -> Experience:
        """This rank's part of the chosen groups. Collective."""
        mine = Experience.concat(self._parts)
        return deal(mine, torch.arange(len(mine)).split(self.group_size), chosen, self.table)


def resample_over_ranks(
    experience: Experience, options: Resampling, group_size: int, seed: int, table: Table
) -> Experience:
    """As many samples, drawn from those of all ranks by their scores. Collective.

    Args:
        experience: this rank's samples, in groups.
        options: how to draw.
        group_size: samples of a group.
        seed: the same on every rank.
        table: where this rank sits.
    """
    assert experience.scores is not None
    places = range(len(experience))
    keys = [(i // group_size * table.world_size + table.rank, i % group_size) for i in places]
    hands = all_hands(keys, 1, table)
    told = table.gather((experience.scores.double(), experience.valid))
    weights_B = resampling_weights(
        rewards_B=torch.stack([told[hand.owner][0][hand.number] for hand in hands]),
        valid_B=torch.stack([told[hand.owner][1][hand.number] for hand in hands]),
        kind=options.kind,
        power=options.power,
    )
    drawn = resample(weights_B=weights_B, generator=torch.Generator().manual_seed(seed)).tolist()
    return deal(experience, torch.arange(len(experience)).split(1), [hands[place] for place in drawn], table)


def balance_over_ranks(experience: Experience, group_size: int, mini_batches: int, table: Table) -> Experience:
    """As many groups on every rank as before, of about as many tokens, each in the mini-batch it was in. Collective.

    Ranks that are about even already keep what they have.

    Args:
        experience: this rank's samples, in groups; every rank has equally many.
        group_size: samples of a group; they stay together, for some of what follows looks at whole groups.
        mini_batches: into how many the samples are cut.
        table: where this rank sits.
    """
    groups = torch.arange(len(experience)).split(group_size)
    numbers = torch.arange(len(groups)).chunk(mini_batches)
    keys = [(part, int(n) * table.world_size + table.rank) for part, chunk in enumerate(numbers) for n in chunk]
    hands = all_hands(keys, group_size, table)
    told = table.gather(experience.sequence_lengths.view(-1, group_size).sum(dim=1).tolist())
    chosen: list[Hand] = []
    moved = False
    for _, hands_of_part in groupby(hands, key=lambda hand: hand.key[0]):
        shares = even_shares({hand: told[hand.owner][hand.number] for hand in hands_of_part}, table.world_size)
        moved = moved or any(hand.owner != rank for rank, share in enumerate(shares) for hand in share)
        # Hands are dealt in turn.
        chosen += [hand for turn in zip(*shares, strict=True) for hand in turn]
    return deal(experience, groups, chosen, table) if moved else experience


def even_shares(tokens: Mapping[Hand, int], world_size: int) -> list[list[Hand]]:
    """The hands of each rank, equally many and of about as many tokens: the longest first, to who has the fewest.

    Where that spares the rank with the most less than a twentieth, they stay: moving them costs time, too. Each share
    is in the order of its keys.
    """
    room = len(tokens) // world_size
    shares: list[list[Hand]] = [[] for _ in range(world_size)]

    def size(share: list[Hand]) -> int:
        return sum(tokens[hand] for hand in share)

    for hand in sorted(tokens, key=lambda hand: (-tokens[hand], hand)):
        min((share for share in shares if len(share) < room), key=size).append(hand)
    as_they_lie = [[hand for hand in tokens if hand.owner == rank] for rank in range(world_size)]
    most_now, most_then = (max(map(size, shares)) for shares in (as_they_lie, shares))
    return [sorted(share) for share in (shares if most_then <= _WORTH_MOVING * most_now else as_they_lie)]
