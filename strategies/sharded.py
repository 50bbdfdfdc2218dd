"""What the strategies have in common that give each rank its shards of every model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.strategies.contract import RolloutMixin, exchange_objects, gather_objects, small_all_reduce

LIGHTNING_FILE = "lightning.ckpt"
"""Of a checkpoint, what is not in the shards of its engines."""


class ShardedStrategy(RolloutMixin, ParallelStrategy):
    """Ranks that hold shards, and talk to each other."""

    _engines: dict[str, Any]

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise sum over all ranks."""
        return small_all_reduce(values, self.root_device, torch.distributed.ReduceOp.SUM)

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Element-wise maximum over all ranks."""
        return small_all_reduce(values, self.root_device, torch.distributed.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank."""
        return gather_objects(value)

    def exchange(self, parcels: list[Any]) -> list[Any]:
        """Give `parcels[i]` to rank i; returns what every rank gave to this one."""
        return exchange_objects(parcels, self.global_rank, self.root_device)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        # The engines save their own shards.
        return {} if self._engines else super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {} if self._engines else super().optimizer_state(optimizer)

    @override
    def teardown(self) -> None:
        if self._rollout is not None and self._rollout_connected:
            self._rollout.close()
            self._rollout_connected = False
        super().teardown()


def optimizers_of_engines(engines: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Optimizer]:
    """The optimizer of each engine that one of them holds.

    Raises:
        ConfigError: an engine with two.
    """
    trained = {}
    for name, model in engines.items():
        own = {id(p) for p in model.parameters()}
        held = [o for o in optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])]
        if len(held) > 1:
            raise ConfigError(f"engine {name!r} has {len(held)} optimizers: configure_optimizers may give it one")
        if held:
            trained[name] = held[0]
    return trained


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
