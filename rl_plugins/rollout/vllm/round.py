"""The requests of several ranks, begun at once when the last of them has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Requests = Mapping[str, tuple[list[int], Any]]
"""Token ids of a prompt and how it is sampled, by the name of the request."""


class Round:
    """What is begun then does not depend on which rank came first."""

    def __init__(self) -> None:
        self._waiting: dict[int, Requests] = {}
        self._begun: asyncio.Future[None] | None = None

    async def join(
        self, rank: int, ranks: Sequence[int], requests: Requests, begin: Callable[[Requests], None]
    ) -> None:
        """Hand in a rank's requests, and wait until those of all are begun.

        Args:
            rank: this one.
            ranks: all that take part.
            requests: of this rank.
            begin: what the last to come calls with the requests of all, in the order of the ranks.
        """
        if self._begun is None:
            self._begun = asyncio.get_running_loop().create_future()
        begun, self._waiting[rank] = self._begun, requests
        if len(self._waiting) == len(ranks):
            everyones, self._waiting, self._begun = self._waiting, {}, None
            try:
                begin({name: request for one in sorted(everyones) for name, request in everyones[one].items()})
            except BaseException as error:
                begun.set_exception(error)
            else:
                begun.set_result(None)
        # Shielded: one rank's deadline must not cancel the round of the others.
        await asyncio.shield(begun)

    def missing(self, ranks: Sequence[int]) -> list[int]:
        """The ranks that have not come."""
        return sorted(set(ranks) - set(self._waiting))

    def cancel(self) -> None:
        """Forget who has come."""
        if self._begun is not None:
            self._begun.cancel()
        self._waiting, self._begun = {}, None
