"""Python objects of samples, one per sample under each name.

Taking samples apart and putting them in another order must not touch such objects one by one: they stay where they are,
in rows that batches share, and each sample knows its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override


class Rows:
    """Columns of equal length, shared by the batches that are cut from one another; nobody changes them."""

    __slots__ = ("columns",)

    def __init__(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        for name, values in columns.items():
            if len(values) != count:
                raise ValueError(f"column {name!r} has {len(values)} entries for {count} samples.")
        self.columns = {name: list(values) for name, values in columns.items()}


class Columns(Mapping[str, list[Any]]):
    """What the samples of one batch have under each name, as lists in their order.

    Args:
        rows: those of the batch and others.
        row_B: the row of each sample, int64 [B].
    """

    def __init__(self, rows: Rows, row_B: Tensor) -> None:
        self._columns, self._row_B = rows.columns, row_B.tolist()

    @override
    def __getitem__(self, name: str) -> list[Any]:
        column = self._columns[name]
        return [column[row] for row in self._row_B]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @override
    def __len__(self) -> int:
        return len(self._columns)
