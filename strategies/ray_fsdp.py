"""`FSDPStrategy` inside a Ray Train worker: the device and the ranks are Ray's.

Ray's `prepare_trainer` does nothing but look for its own three strategies, none of which knows FSDP2: leave it out. The
trainer needs `plugins=[RayLightningEnvironment()]` as ever.
"""

from __future__ import annotations

from typing import Any

import ray.train.torch
import torch
from typing_extensions import override

from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.ray_rollout import RayRolloutMixin


class RayFSDPStrategy(RayRolloutMixin, FSDPStrategy):
    """FSDP2 with named engines and a rollout engine, under Ray Train. Arguments: see `FSDPStrategy`."""

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("rl_ray_fsdp", cls, description="FSDP2 under Ray Train")

    @property
    @override
    def root_device(self) -> torch.device:
        device: torch.device = ray.train.torch.get_device()
        return device
