"""A table of functions by name, to which installed packages add theirs through entry points.

A package that declares

    [project.entry-points."rl_plugins.policy_losses"]
    my_loss = "my_package.losses:my_loss"

adds `my_loss` to the policy losses; nothing of it is imported before the name is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

F = TypeVar("F")


class Table(Mapping[str, F]):
    """The project's functions of one kind, and those of the entry points of a group.

    Args:
        group: name of the entry points' group.
        own: the project's functions; no entry point can replace one.
    """

    def __init__(self, group: str, own: Mapping[str, F]) -> None:
        self.group, self._own = group, dict(own)

    @cached_property
    def _added(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self._own}

    def __getitem__(self, name: str) -> F:
        """The function of that name.

        Raises:
            KeyError: nobody has it.
        """
        if name in self._own:
            return self._own[name]
        function: F = self._added[name].load()
        return function

    def __iter__(self) -> Iterator[str]:
        """The names, the project's first."""
        yield from self._own
        yield from self._added

    def __len__(self) -> int:
        """How many functions there are."""
        return len(self._own) + len(self._added)
