"""Parts of the training data that are served in given shares."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.data.orders import Mixture, Part
from rl_plugins.data.parquet import Paths, PromptRows, RowSource, load_rows
from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class MixturePart:
    """A part of the training data.

    Attributes:
        files: its parquet files.
        weight: its share of the prompts of every step, as a number that is compared with the other parts'.
    """

    files: Paths
    weight: float = 1.0

    def __post_init__(self) -> None:
        """Check that there is something to serve."""
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ConfigError(f"weight={self.weight} of {self.files}: must be above 0")
        if not self.paths:
            raise ConfigError("a part of a mixture has no files: name one or more parquet files")

    @property
    def paths(self) -> list[Any]:
        """Its files as a list."""
        return [self.files] if isinstance(self.files, str | os.PathLike) else list(self.files)


Parts = Mapping[str, MixturePart]
Source = Paths | RowSource | Parts


def load_parts(source: Source, columns: Sequence[str]) -> tuple[PromptRows, list[int]]:
    """Load all parts, one after the other; returns the rows and the first row of each part.

    Raises:
        ConfigError: see `load_rows`.
    """
    if not isinstance(source, Mapping):
        return load_rows(source, columns), [0]
    rows = load_rows([path for part in source.values() for path in part.paths], columns)
    sizes = [len(part.paths) for part in source.values()]
    return rows, [rows.origins[sum(sizes[:number])][1] for number in range(len(sizes))]


def mixed(source: Source, firsts: Sequence[int], rows: int, *, prompts_per_step: int, seed: int) -> Mixture:
    """Return the parts in their shares; data that is not in parts is a single one.

    Args:
        source: the parts.
        firsts: the first row of each.
        rows: of all parts.
        prompts_per_step: rows in the global batch of one step.
        seed: seed of the order.

    Raises:
        ConfigError: see `Mixture`.
    """
    weights = (
        {f"data.mixture.{name}": part.weight for name, part in source.items()} if isinstance(source, Mapping) else {}
    )
    weights = weights or {"the training data": 1.0}
    total = math.fsum(weights.values())
    parts = [
        Part(name, first, end - first, weight / total)
        for (name, weight), first, end in zip(weights.items(), firsts, [*firsts[1:], rows], strict=True)
    ]
    return Mixture(parts, prompts_per_step=prompts_per_step, seed=seed)
