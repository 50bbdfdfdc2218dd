"""Samples that change ranks: chosen from those of all ranks, and dealt to them in turn.

An algorithm may choose among the samples of all ranks (dynamic sampling, resampling). The order in which they are dealt
is that of the prompts in the global batch, so that the mini-batches of a step are the same sets of samples for any
number of ranks. Inside each mini-batch their turns are such that all ranks get about as many tokens to train on: ranks
that meet in every forward pass are as slow as the one with the longest responses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.resampling import Resampling, resample, resampling_weights
from rl_plugins.data.experience import Experience

T = TypeVar("T")

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
        tokens: of all of them.
    """

    key: tuple[int, ...]
    owner: int
    number: int
    size: int
    tokens: int


def all_hands(keys: Sequence[tuple[int, ...]], size: int, tokens: Sequence[int], table: Table) -> list[Hand]:
    """The hands of all ranks, of `size` samples each, in the order of their keys, given this rank's. Collective."""
    told = table.gather(list(zip(keys, tokens, strict=True)))
    return sorted(
        Hand(key, owner, number, size, count)
        for owner, theirs in enumerate(told)
        for number, (key, count) in enumerate(theirs)
    )


def even_turns(chosen: Sequence[Hand], mini_batches: int, table: Table) -> list[Hand]:
    """The same hands in another order: dealt in turn, all ranks get about as many tokens in each mini-batch.

    Args:
        chosen: in the order in which mini-batches take them; the number of ranks divides their number.
        mini_batches: of a rank.
        table: where this rank sits.
    """
    of_rank = len(chosen) // table.world_size
    size = -(-of_rank // mini_batches) * table.world_size
    turns: list[Hand] = []
    for start in range(0, len(chosen), size):
        shares = even_shares(chosen[start : start + size], table.world_size)
        turns += [hand for turn in zip(*shares, strict=True) for hand in turn]
    return turns


def even_shares(hands: Sequence[Hand], world_size: int) -> list[list[Hand]]:
    """The hands of each rank, equally many and of about as many tokens: the longest first, to who has the fewest.

    Where that spares the rank with the most less than a twentieth, they stay where they are: moving them costs time,
    too. Each share is in the order in which the hands were given.
    """
    room = len(hands) // world_size
    shares: list[list[int]] = [[] for _ in range(world_size)]
    tokens = [0] * world_size
    for place in sorted(range(len(hands)), key=lambda place: (-hands[place].tokens, place)):
        rank = min((rank for rank in range(world_size) if len(shares[rank]) < room), key=tokens.__getitem__)
        shares[rank].append(place)
        tokens[rank] += hands[place].tokens
    as_they_lie = [[place for place, hand in enumerate(hands) if hand.owner == rank] for rank in range(world_size)]
    if all(len(share) == room for share in as_they_lie):
        most_now = max(sum(hands[place].tokens for place in share) for share in as_they_lie)
        if max(tokens) > _WORTH_MOVING * most_now:
            shares = as_they_lie
    return [[hands[place] for place in sorted(share)] for share in shares]


def deal_groups(groups: Sequence[T], chosen: Sequence[Hand], table: Table) -> list[T]:
    """What this rank gets when the chosen hands, a group each, are dealt in turn. Collective.

    Args:
        groups: this rank's.
        chosen: the same list on every rank; the number of ranks divides its length.
        table: where this rank sits.
    """
    parcels = [
        [groups[hand.number] for hand in chosen[rank :: table.world_size] if hand.owner == table.rank]
        for rank in range(table.world_size)
    ]
    received = [iter(parcel) for parcel in (table.exchange(parcels) if _some_move(chosen, table) else parcels)]
    return [next(received[hand.owner]) for hand in chosen[table.rank :: table.world_size]]


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
    received = table.exchange(parcels) if _some_move(chosen, table) else parcels
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
    _tokens: list[int] = field(default_factory=list)

    def add(self, experience: Experience, kept_B: Tensor, draw: int) -> list[Hand]:
        """Keep the groups of a draw that are marked; returns all that are kept on all ranks. Collective."""
        self._parts.append(experience[kept_B])
        self._tokens += self._parts[-1].sequence_lengths.view(-1, self.group_size).sum(dim=1).tolist()
        places = kept_B[:: self.group_size].nonzero().flatten().tolist()
        self._keys += [(draw, place * self.table.world_size + self.table.rank) for place in places]
        return all_hands(self._keys, self.group_size, self._tokens, self.table)

    def take(self, chosen: Sequence[Hand], mini_batches: int) -> Experience:
        """This rank's part of the chosen groups, in so many mini-batches. Collective."""
        mine = Experience.concat(self._parts)
        turns = even_turns(chosen, mini_batches, self.table)
        return deal(mine, torch.arange(len(mine)).split(self.group_size), turns, self.table)


def resample_over_ranks(
    experience: Experience, options: Resampling, group_size: int, mini_batches: int, seed: int, table: Table
) -> Experience:
    """As many samples, drawn from those of all ranks by their scores. Collective.

    Args:
        experience: this rank's samples, in groups.
        options: how to draw.
        group_size: samples of a group.
        mini_batches: into how many the samples of a rank are cut.
        seed: the same on every rank.
        table: where this rank sits.
    """
    assert experience.scores is not None
    places = range(len(experience))
    keys = [(i // group_size * table.world_size + table.rank, i % group_size) for i in places]
    hands = all_hands(keys, 1, experience.sequence_lengths.tolist(), table)
    told = table.gather((experience.scores.double(), experience.valid))
    weights_B = resampling_weights(
        rewards_B=torch.stack([told[hand.owner][0][hand.number] for hand in hands]),
        valid_B=torch.stack([told[hand.owner][1][hand.number] for hand in hands]),
        kind=options.kind,
        power=options.power,
    )
    drawn = resample(weights_B=weights_B, generator=torch.Generator().manual_seed(seed)).tolist()
    turns = even_turns([hands[place] for place in drawn], mini_batches, table)
    return deal(experience, torch.arange(len(experience)).split(1), turns, table)


def _some_move(chosen: Sequence[Hand], table: Table) -> bool:
    return any(hand.owner != place % table.world_size for place, hand in enumerate(chosen))
