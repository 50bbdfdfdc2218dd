"""Strategies in a Ray Train worker. Ray gives device and ranks, and all workers share the rollout engine of rank 0.

A train function runs on every rank and may make a rollout engine on each rank, so the other engines are not used.
Ray's `prepare_trainer` accepts only subclasses of Ray's own strategies. `RayZeroStrategy` is one. FSDP2 has no such
class: leave out the call with `RayFSDPStrategy`. Pass `plugins=[RayLightningEnvironment()]` to the trainer with both.
"""

from __future__ import annotations

import os

import ray.train.torch
import torch
from ray.train.lightning import RayDeepSpeedStrategy
from typing_extensions import override

from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.zero import ZeroStrategy


class RayZeroStrategy(ZeroStrategy, RayDeepSpeedStrategy):
    """DeepSpeed ZeRO with named models and a rollout engine, under Ray Train's `TorchTrainer`.

    Args: see `ZeroStrategy`.
    """

    _one_rollout_engine = True

    @override
    def setup_environment(self) -> None:
        if self.root_device.type == "cpu":
            # At the first use, DeepSpeed would choose any device of the machine.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        super().setup_environment()
        if self.root_device.type == "cuda":
            # DeepSpeed takes this number for the index of the GPU. Ray Train sorts ranks by number and visible GPUs as
            # text, so the index is another number on machines with more than ten GPUs.
            os.environ["LOCAL_RANK"] = str(self.root_device.index)


class RayFSDPStrategy(FSDPStrategy):
    """FSDP2 with named models and a rollout engine, under Ray Train's `TorchTrainer`. Args: see `FSDPStrategy`.

    Leave out the call of Ray's `prepare_trainer`, which refuses this class.
    """

    _one_rollout_engine = True

    @property
    @override
    def root_device(self) -> torch.device:
        device: torch.device = ray.train.torch.get_device()
        return device
