"""Parts that `ZeroStrategy` and `FSDPStrategy` share.

Waits of Lightning are between the hosts of the ranks: the GPU of a waiting rank stays free for a rollout engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch.optim import Optimizer
from typing_extensions import override

from rl_plugins.ranks import barrier, broadcast

T = TypeVar("T")


class ShardedStrategy(LightningStrategy):
    """Waits of a strategy between the hosts of the ranks, and no states of model engines in Lightning's checkpoint.

    Lightning's waits are those of `rl_plugins.ranks`. `save_checkpoint` of a subclass saves the shards of the model
    engines. A subclass sets `_model_engines`, and has a strategy of Lightning as its last base.
    """

    restored: Mapping[str, str] = MappingProxyType({})
    known_intact: Path | None = None
    _model_engines: dict[str, Any]
    _one_rollout_engine = False

    @override
    def barrier(self, name: str | None = None) -> None:
        barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        return broadcast(obj, src)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {} if self._model_engines else super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {} if self._model_engines else super().optimizer_state(optimizer)
