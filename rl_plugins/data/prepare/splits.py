"""Choice of different items for the splits of made-up data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

from rl_plugins.errors import ConfigError

Item = TypeVar("Item")


def choose_splits(
    items: Sequence[Item], rng: random.Random, *, num_train: int, num_dev: int, num_test: int
) -> dict[str, list[Item]]:
    """Return items for the splits `train`, `dev` and `test`, in a random order. No item comes twice.

    Args:
        items: different items to choose from.
        rng: source of the choice.
        num_train: number of items of the split `train`.
        num_dev: number of items of the split `dev`.
        num_test: number of items of the split `test`.

    Raises:
        ConfigError: a number is below 1, or there are fewer items than asked for.
    """
    sizes = {"train": num_train, "dev": num_dev, "test": num_test}
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
