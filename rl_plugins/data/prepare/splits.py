"""Choice of different items for the splits of made-up data."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeVar

from rl_plugins.errors import ConfigError

Item = TypeVar("Item")


def choose_splits(items: Sequence[Item], rng: random.Random, sizes: Mapping[str, int]) -> dict[str, list[Item]]:
    """Return items for each split, in a random order. No item comes twice.

    Args:
        items: different items to choose from.
        rng: source of the choice.
        sizes: number of items of each split.

    Raises:
        ConfigError: a number is below 1, or there are fewer items than asked for.
    """
    for split, size in sizes.items():
        if size < 1:
            raise ConfigError(f"num_{split}={size}: must be 1 or more")
    total = sum(sizes.values())
    if total > len(items):
        raise ConfigError(
            f"{total} rows are asked for ({', '.join(f'{size} {split}' for split, size in sizes.items())}), but there "
            f"are only {len(items)} different ones: ask for fewer rows"
        )
    chosen = iter(rng.sample(items, total))
    return {split: list(islice(chosen, size)) for split, size in sizes.items()}
