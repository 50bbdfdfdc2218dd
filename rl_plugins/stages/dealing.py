"""Samples that change ranks: chosen from those of all ranks, and dealt to them in turn.

Samples stay on the rank that asked for them unless an algorithm chooses among those of all ranks (dynamic sampling,
resampling). The order in which they are dealt is that of the prompts in the global batch, so that the mini-batches of
a step are the same sets of samples for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from rl_plugins.data.experience import Experience

Exchange = Callable[[list[Any]], list[Any]]
"""Gives item i of the list to rank i; returns what every rank gave to this one, in their order. Collective."""


class Hand(NamedTuple):
    """Samples that stay together, known to all ranks.

    Attributes:
        key: sorts the hands of all ranks; unique.
        owner: the rank that has them.
        index: their number there.
    """

    key: tuple[int, ...]
    owner: int
    index: int


def all_hands(keys: Sequence[tuple[int, ...]], rank: int, world_size: int, exchange: Exchange) -> list[Hand]:
    """The hands of all ranks in the order of their keys. Collective.

    Args:
        keys: of this rank's hands.
        rank: this one.
        world_size: number of ranks.
        exchange: see `Exchange`.
    """
    told = exchange([list(keys)] * world_size)
    return sorted(Hand(key, owner, index) for owner, theirs in enumerate(told) for index, key in enumerate(theirs))


def deal(
    experience: Experience,
    hands: Sequence[Tensor],
    chosen: Sequence[Hand],
    rank: int,
    world_size: int,
    exchange: Exchange,
) -> Experience:
    """What this rank gets when the chosen hands are dealt in turn. Collective.

    Args:
        experience: this rank's samples.
        hands: indices of the samples of each of this rank's hands.
        chosen: the same list on every rank; a hand may be there several times; the number of ranks divides its length.
        rank: this one.
        world_size: number of ranks.
        exchange: see `Exchange`.
    """
    parcels: list[dict[int, Experience]] = [{} for _ in range(world_size)]
    for place, hand in enumerate(chosen):
        if hand.owner == rank:
            parcels[place % world_size][place] = experience[hands[hand.index]]
    got: dict[int, Experience] = {}
    for parcel in exchange(list(parcels)):
        got.update(parcel)
    return Experience.concat([got[place] for place in sorted(got)])
