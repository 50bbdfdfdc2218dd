"""`ZeroStrategy` inside a Ray Train worker: the device and the ranks are Ray's; `prepare_trainer` accepts it."""

from __future__ import annotations

import os
from typing import Any

from ray.train.lightning import RayDeepSpeedStrategy
from typing_extensions import override

from rl_plugins.strategies.ray_rollout import RayRolloutMixin
from rl_plugins.strategies.zero import ZeroStrategy


class RayZeroStrategy(RayRolloutMixin, ZeroStrategy, RayDeepSpeedStrategy):
    """ZeRO with named engines and a rollout engine, under Ray Train's `TorchTrainer`. Arguments: see `ZeroStrategy`."""

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for stage in (1, 2, 3):
            strategy_registry.register(
                f"rl_ray_zero_{stage}", cls, description=f"ZeRO stage {stage} under Ray Train", stage=stage
            )

    @override
    def setup_environment(self) -> None:
        if self.root_device.type == "cpu":
            # DeepSpeed decides once, when it is first used, and would take any device of the machine.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().setup_environment()
