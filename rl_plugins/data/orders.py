"""Which rows a step takes: a pure function of (seed, step), so that one number is the whole state.

`Shuffled` serves every row once in an epoch. `Mixture` serves parts of the data in given shares, without end: each part
in passes of its own, and never a row twice within a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rl_plugins.errors import ConfigError

# The last number of a seed says what it is for.
_STEP, _PASS = 1, 2


class Order(Protocol):
    """Which rows the steps take.

    Attributes:
        identity: what the order follows from beside seed, rows and prompts per step; a state of another is refused.
    """

    identity: dict[str, Any]

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, int64 [G]."""


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Return the permutation of the rows for one epoch, the same with every version of NumPy."""
    return permutation([seed, epoch], rows)


def permutation(seed: Sequence[int], rows: int) -> np.ndarray:
    """Return a permutation that follows from up to four numbers; zeros at their end change nothing."""
    # NumPy promises stable streams for the bit generators alone, not for `Generator.permutation`.
    return np.argsort(np.random.PCG64(seed).random_raw(rows), kind="stable")


class Shuffled:
    """Each epoch is a permutation of the rows, whose last incomplete batch is dropped."""

    def __init__(self, rows: int, *, prompts_per_step: int, seed: int) -> None:
        """Set the options."""
        self.identity: dict[str, Any] = {}
        self._rows, self._size, self._seed = rows, prompts_per_step, seed
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, int64 [G]."""
        epoch, position = divmod(step, self._rows // self._size)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, epoch_order(self._seed, epoch, self._rows))
        return self._epoch[1][position * self._size :][: self._size]


@dataclass(frozen=True)
class Part:
    """Some of the rows.

    Attributes:
        name: for messages.
        first: its first row.
        rows: how many it has.
        share: of the prompts of every step.
    """

    name: str
    first: int
    rows: int
    share: float


class Mixture:
    """An endless stream of rows out of several parts, in their shares."""

    def __init__(self, parts: Sequence[Part], *, prompts_per_step: int, seed: int) -> None:
        """Set the options.

        Args:
            parts: neighbours, that are all rows together; their shares sum to 1.
            prompts_per_step: rows in the global batch of one step.
            seed: seed of the order.

        Raises:
            ConfigError: a part is too small for its share, or its share too small to be served at all.
        """
        self.identity = {part.name: [part.rows, part.share] for part in parts}
        self.parts = parts
        self._size, self._seed = prompts_per_step, seed
        # Of one epoch; every epoch has the same numbers of rows of each part.
        self._length = sum(part.rows for part in parts) // prompts_per_step * prompts_per_step
        self._counts = _apportioned([part.share for part in parts], self._length)
        self._passes = []
        for number, (part, count) in enumerate(zip(parts, self._counts, strict=True)):
            if count == 0:
                raise ConfigError(
                    f"{part.name}: its weight gives it none of the {self._length} prompts of an epoch: "
                    "raise it, or leave the part out"
                )
            # At most so many of the part are in a step, wherever it begins.
            most = min(prompts_per_step, int(np.ceil(part.share * (prompts_per_step + 4 * len(parts)))) + 4)
            if part.rows < 3 * most:
                raise ConfigError(
                    f"{part.name}: {part.rows} rows are too few for a share of {part.share:.3g} of "
                    f"{prompts_per_step} prompts per step (it takes {3 * most}, so that no step holds a prompt twice): "
                    "lower its weight or prompts_per_step, or add rows"
                )
            self._passes.append(_Passes(part.first, part.rows, apart=most, seed=(seed, number)))
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, int64 [G]."""
        batch = self.take(step * self._size, self._size)
        # Neighbours go to different ranks: parts that take turns would be dealt one to each.
        return batch[permutation([self._seed, step, 0, _STEP], len(batch))]

    def take(self, start: int, count: int) -> np.ndarray:
        """Return `count` rows of the stream from place `start`, int64 [count]."""
        taken = []
        while count:
            epoch, position = divmod(start, self._length)
            taken.append(self._order(epoch)[position : position + count])
            start, count = start + len(taken[-1]), count - len(taken[-1])
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def _order(self, epoch: int) -> np.ndarray:
        if self._epoch[0] != epoch:
            places = [(np.arange(count) + 0.5) / count for count in self._counts]
            rows = [passes.take(epoch * count, count) for passes, count in zip(self._passes, self._counts, strict=True)]
            self._epoch = (epoch, np.concatenate(rows)[np.argsort(np.concatenate(places), kind="stable")])
        return self._epoch[1]


@dataclass(frozen=True)
class _Passes:
    """Pass after pass over the rows from `first`; `apart` rows in a row, wherever they begin, are all different."""

    first: int
    rows: int
    apart: int
    seed: tuple[int, int]

    def take(self, start: int, count: int) -> np.ndarray:
        number, skipped = divmod(start, self.rows)
        passes = [self._pass(number + i) for i in range(-(-(skipped + count) // self.rows))]
        return self.first + np.concatenate(passes)[skipped : skipped + count]

    def _pass(self, number: int) -> np.ndarray:
        order = self._shuffled(number)
        if number == 0:
            return order
        # With three times as many rows, what comes first now changes nothing in what comes last.
        last = self._shuffled(number - 1)[-self.apart :]
        fresh = order[~np.isin(order, last)][: self.apart]
        return np.concatenate([fresh, order[~np.isin(order, fresh)]])

    def _shuffled(self, number: int) -> np.ndarray:
        return permutation([*self.seed, number, _PASS], self.rows)


def _apportioned(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers in these shares that sum to `total` (largest remainders)."""
    exact = np.asarray(shares) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()
