"""What the strategies have in common that give each rank its shards of every model."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from rl_plugins.strategies.contract import RolloutMixin, exchange_objects, small_all_reduce

LIGHTNING_FILE = "lightning.ckpt"
"""Of a checkpoint, what is not in the shards of its engines."""


class ShardedStrategy(RolloutMixin, ParallelStrategy):
    """Ranks that hold shards, and talk to each other."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks."""
        return small_all_reduce(values, self.root_device, torch.distributed.ReduceOp.SUM)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise maximum over all ranks."""
        return small_all_reduce(values, self.root_device, torch.distributed.ReduceOp.MAX)

    def exchange(self, parcels: list[Any]) -> list[Any]:
        """Give `parcels[i]` to rank i; returns what every rank gave to this one."""
        return exchange_objects(parcels, self.global_rank)

    @override
    def teardown(self) -> None:
        if self._rollout is not None and self._rollout_connected:
            self._rollout.close()
            self._rollout_connected = False
        super().teardown()


def blend_shard(own: Tensor, other: Tensor, keep: float, masters: dict[str, Tensor], name: str) -> None:
    """A shard becomes `keep * own + (1 - keep) * other`, in place.

    Args:
        own: the shard.
        other: that of the other engine.
        keep: share that it keeps.
        masters: float32 averages of shards in low precision, by name.
        name: of the parameter.
    """
    if keep == 0 or own.dtype == torch.float32:
        own.lerp_(other.to(own), 1 - keep)
    else:
        master = masters.setdefault(name, own.float())
        own.copy_(master.lerp_(other.float(), 1 - keep))
