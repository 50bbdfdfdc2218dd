"""The rollout engine of a strategy inside Ray Train's workers."""

from __future__ import annotations

from lightning.pytorch.strategies import ParallelStrategy
from typing_extensions import override

from rl_plugins.strategies.contract import RolloutMixin


class RayRolloutMixin(RolloutMixin, ParallelStrategy):
    """All workers share the engine of rank 0."""

    @override
    def connect_rollout(self, rank: int, world_size: int) -> None:
        if not self._rollout_connected:
            # A train function runs on every rank and may have made an engine there.
            self._rollout = self.broadcast(self._rollout)
        super().connect_rollout(rank, world_size)
