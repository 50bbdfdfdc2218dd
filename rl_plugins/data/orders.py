"""Training orders: the rows of each step as a pure function of (seed, step), so one number is the whole state.

`Shuffled` and `InOrder` serve every row once in an epoch. `Mixture` serves several parts of the data in given shares,
without end: each part in passes of its own, and never a row twice within a step. `MixturePart` describes such a part
by its files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from rl_plugins.config.data import MixturePart
from rl_plugins.data.parquet import OWN_COLUMNS, Paths, PromptRows, RowForm, RowSource, load_rows
from rl_plugins.errors import ConfigError

# Last number of a seed: its purpose.
_STEP, _PASS = 1, 2
_GOLDEN_RATIO = (5**0.5 - 1) / 2
# Number of the way to order several parts. Another way needs another number: a resume would get other rows.
_METHOD = 2


class Order(Protocol):
    """The rows of each step.

    Attributes:
        identity: everything the order depends on beside the seed, the number of rows and the prompts per step. A
            checkpoint with another identity is refused.
    """

    identity: dict[str, Any]

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, int64 [G]."""


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Return the permutation of the rows for one epoch; it is the same with every version of NumPy."""
    return permutation([seed, epoch], rows)


def permutation(seed: Sequence[int], rows: int) -> np.ndarray:
    """Return a permutation of `rows` numbers, seeded with up to four numbers; trailing zeros change nothing."""
    # NumPy promises stable streams for the bit generators alone, not for `Generator.permutation`.
    return np.argsort(np.random.PCG64(seed).random_raw(rows), kind="stable")


class Shuffled:
    """Order with one permutation of the rows per epoch; the last incomplete batch of an epoch is dropped.

    Args:
        rows: number of rows.
        prompts_per_step: rows in the global batch of one step.
        seed: seed of the order.
    """

    def __init__(self, rows: int, *, prompts_per_step: int, seed: int) -> None:
        self.identity: dict[str, Any] = {}
        self._rows, self._size, self._seed = rows, prompts_per_step, seed
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, int64 [G]."""
        epoch, position = divmod(step, self._rows // self._size)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, epoch_order(self._seed, epoch, self._rows))
        return self._epoch[1][position * self._size :][: self._size]


class InOrder:
    """Order of the rows in the data, in every epoch; the last incomplete batch of an epoch is dropped.

    Args:
        rows: number of rows.
        prompts_per_step: rows in the global batch of one step.
    """

    def __init__(self, rows: int, *, prompts_per_step: int) -> None:
        self.identity: dict[str, Any] = {"shuffle": False}
        self._rows, self._size = rows, prompts_per_step

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, int64 [G]."""
        position = step % (self._rows // self._size)
        return np.arange(position * self._size, (position + 1) * self._size, dtype=np.int64)


# Mixtures ---------------------------------------------------------------------------------------------------------


Source = Paths | RowSource | Mapping[str, MixturePart]
"""Training data: one file, several files, a data set, or the parts of a mixture by name."""


def load_parts(
    source: Source, columns: Sequence[str], form: RowForm | None = None, *, limit: int | None = None
) -> tuple[PromptRows, list[int]]:
    """Load the rows of all parts, one part after the other.

    Args:
        source: the training data; data without parts is a single part.
        columns: names of the columns every row must have.
        form: form of rows with other columns than prompts have.
        limit: number of rows to choose, for each part its share; None for all rows. Each choice is one random row of
            each stretch of the data, the same in every process.

    Returns:
        The rows, and the number of the first row of each part.

    Raises:
        ConfigError: see `load_rows`; or a column of prompts has the name of a column that training adds.
    """
    if isinstance(source, Mapping):
        for name, part in source.items():
            if not isinstance(part, MixturePart):
                raise ConfigError(
                    f"the training data is a mapping, whose {name!r} is a {type(part).__name__} and no MixturePart: "
                    "give a list of rows, or MixturePart(files=[...]) under each name"
                )
        parts = cast(Mapping[str, MixturePart], source).values()
        rows = _load_rows([path for part in parts for path in part.paths], columns, form)
        sizes, weights = [len(part.paths) for part in parts], [part.weight for part in parts]
        firsts = [rows.origins[sum(sizes[:number])][1] for number in range(len(sizes))]
    else:
        rows, weights, firsts = _load_rows(source, columns, form), [1.0], [0]
    if limit is None or limit >= len(rows):
        return rows, firsts
    total = math.fsum(weights)
    counts = _apportioned([weight / total for weight in weights], limit)
    ends = [*firsts[1:], len(rows)]
    chosen = [first + _spread(end - first, count) for first, end, count in zip(firsts, ends, counts, strict=True)]
    return rows.chosen(np.concatenate(chosen)), np.cumsum([0, *map(len, chosen[:-1])]).tolist()


def _spread(rows: int, limit: int) -> np.ndarray:
    """Return the numbers of up to `limit` rows: a random row of each of `limit` stretches, int64 [N]."""
    if limit >= rows or not limit:
        return np.arange(min(rows, limit))
    bounds = np.arange(limit + 1) * rows // limit
    # A fixed distance would choose only one of two sources that alternate.
    draws = np.random.PCG64(0).random_raw(limit) % np.diff(bounds).astype(np.uint64)
    return bounds[:-1] + draws.astype(np.int64)


def _load_rows(source: Paths | RowSource, columns: Sequence[str], form: RowForm | None) -> PromptRows:
    rows = load_rows(source, columns, form)
    if "reward_model" in columns and (taken := sorted(OWN_COLUMNS.intersection(rows.columns))):
        name, _ = rows.origins[0]
        raise ConfigError(f"{name}: training adds a column {taken[0]!r} of its own: rename the column of the data")
    return rows


@dataclass(frozen=True)
class RowRange:
    """Neighbouring rows that form one part of a mixture.

    Attributes:
        name: name of the part, for messages and for the order's identity.
        first: number of the first row.
        rows: number of rows.
        share: share of the prompts of every step.
    """

    name: str
    first: int
    rows: int
    share: float


class Mixture:
    """Endless stream of rows from several parts in their shares.

    Args:
        parts: neighbouring ranges of rows that cover all rows; their shares sum to 1.
        prompts_per_step: rows in the global batch of one step.
        seed: seed of the order.

    Raises:
        ConfigError: a part has too few rows for its share, or its share is too small to get any row of an epoch.
    """

    def __init__(self, parts: Sequence[RowRange], *, prompts_per_step: int, seed: int) -> None:
        method = {"method": _METHOD} if len(parts) > 1 else {}
        self.identity = {**{part.name: [part.rows, part.share] for part in parts}, **method}
        self.parts = parts
        self._size, self._seed = prompts_per_step, seed
        # Every epoch has this many rows, and the same number of rows of each part.
        self._length = sum(part.rows for part in parts) // prompts_per_step * prompts_per_step
        self._counts = _apportioned([part.share for part in parts], self._length)
        self._passes = []
        for number, (part, count) in enumerate(zip(parts, self._counts, strict=True)):
            if count == 0:
                raise ConfigError(
                    f"{part.name}: its weight gives it none of the {self._length} prompts of an epoch: "
                    "raise the weight (or max_train_rows), or leave the part out"
                )
            # Upper bound of the part's rows in any `prompts_per_step` neighbouring places of the stream.
            most = min(prompts_per_step, int(np.ceil(part.share * (prompts_per_step + 4 * len(parts)))) + 4)
            if part.rows < 3 * most:
                raise ConfigError(
                    f"{part.name}: {part.rows} rows are too few for a share of {part.share:.3g} of "
                    f"{prompts_per_step} prompts per step (it takes {3 * most}, so that no step holds a prompt twice): "
                    "lower its weight or prompts_per_step, or add rows (or raise max_train_rows)"
                )
            self._passes.append(_Passes(part.first, part.rows, distinct=most, seed=(seed, number)))
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def batch(self, step: int) -> np.ndarray:
        """Return the rows of the global batch of a step, int64 [G]."""
        batch = self.take(step * self._size, self._size)
        # Ranks take the rows of a batch in turn. In the stream, parts come in turn too: without this permutation, one
        # rank could get the rows of one part only.
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
            # Parts begin at different places: parts of the same size would otherwise all come after the same rows. The
            # golden ratio spreads the beginnings of any number of parts.
            begins = [(0.5 + number * _GOLDEN_RATIO) % 1 for number in range(len(self._counts))]
            places = [(np.arange(count) + begin) / count for count, begin in zip(self._counts, begins, strict=True)]
            rows = [passes.take(epoch * count, count) for passes, count in zip(self._passes, self._counts, strict=True)]
            self._epoch = (epoch, np.concatenate(rows)[np.argsort(np.concatenate(places), kind="stable")])
        return self._epoch[1]


def build_mixture(source: Source, firsts: Sequence[int], rows: int, *, prompts_per_step: int, seed: int) -> Mixture:
    """Return the mixture of the parts of the training data; data without parts is a single part.

    Args:
        source: the training data.
        firsts: number of the first row of each part.
        rows: number of rows of all parts.
        prompts_per_step: rows in the global batch of one step.
        seed: seed of the order.

    Raises:
        ConfigError: see `Mixture`.
    """
    if isinstance(source, Mapping):
        # Checkpoints hold these names.
        weights = {
            f"data.mixture.{name}": part.weight for name, part in cast(Mapping[str, MixturePart], source).items()
        }
    else:
        weights = {"the training data": 1.0}
    total = math.fsum(weights.values())
    parts = [
        RowRange(name, first, end - first, weight / total)
        for (name, weight), first, end in zip(weights.items(), firsts, [*firsts[1:], rows], strict=True)
    ]
    return Mixture(parts, prompts_per_step=prompts_per_step, seed=seed)


@dataclass(frozen=True)
class _Passes:
    """Permutations of one part's rows, one after the other.

    Attributes:
        first: number of the first row.
        rows: number of rows.
        distinct: number of neighbouring places with different rows, also where one pass ends and the next pass begins.
        seed: seed of the order and number of the part.
    """

    first: int
    rows: int
    distinct: int
    seed: tuple[int, int]

    def take(self, start: int, count: int) -> np.ndarray:
        number, skipped = divmod(start, self.rows)
        passes = [self._pass(number + i) for i in range(-(-(skipped + count) // self.rows))]
        return self.first + np.concatenate(passes)[skipped : skipped + count]

    def _pass(self, number: int) -> np.ndarray:
        order = self._shuffled(number)
        if number == 0:
            return order
        # A part has at least 3 * distinct rows, so moving rows to the front leaves the last `distinct` rows unchanged.
        last = self._shuffled(number - 1)[-self.distinct :]
        fresh = order[~np.isin(order, last)][: self.distinct]
        return np.concatenate([fresh, order[~np.isin(order, fresh)]])

    def _shuffled(self, number: int) -> np.ndarray:
        return permutation([*self.seed, number, _PASS], self.rows)


def _apportioned(shares: Sequence[float], total: int) -> list[int]:
    """Return whole numbers in proportion to the shares with the sum `total` (largest remainders)."""
    exact = np.asarray(shares) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()
