"""Waits of Lightning between the hosts of the ranks: the GPU of a waiting rank stays free for a rollout engine."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch.strategies import Strategy as LightningStrategy
from typing_extensions import override

from rl_plugins.ranks import barrier, broadcast

T = TypeVar("T")


class HostWaits(LightningStrategy):
    """Waits of a strategy between the hosts of the ranks, as in `rl_plugins.ranks`, with the waits of Lightning.

    A subclass has a strategy of Lightning as its last base.
    """

    @override
    def barrier(self, name: str | None = None) -> None:
        barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return broadcast(obj, src)
