"""Base class of sequences whose items are made on access."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar, overload

Item = TypeVar("Item", covariant=True)


class SequenceWithSlices(Sequence[Item]):
    """Sequence that returns a list for a slice; a subclass defines the length and each single item."""

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return one item, or a list of items."""
        if isinstance(index, slice):
            return [self.item(number) for number in range(*index.indices(len(self)))]
        return self.item(index)

    @abstractmethod
    def item(self, number: int) -> Item:
        """Return the item with a number.

        Raises:
            IndexError: there is no such item; `for` loops end with this error.
        """
