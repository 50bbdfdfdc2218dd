"""Strategies in a worker of Ray Train."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from rl_plugins.strategies.ray import RayZeroStrategy
from rl_plugins.strategies.zero import ZeroStrategy


@pytest.mark.parametrize(("device", "local_rank"), [("cuda:10", "10"), ("cpu", "2")])
def test_ray_zero_strategy_gives_deepspeed_the_index_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, local_rank: str
) -> None:
    """The third of sixteen ranks of a machine has GPU 2, the eleventh of the sorted names 0, 1, 10, 11, ..., 2."""

    class Strategy(RayZeroStrategy):
        root_device: Any = torch.device(device)

    def set_up_as_lightning(strategy: ZeroStrategy) -> None:
        os.environ["LOCAL_RANK"] = "2"

    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(ZeroStrategy, "setup_environment", set_up_as_lightning)
    Strategy.setup_environment(Strategy.__new__(Strategy))
    assert os.environ["LOCAL_RANK"] == local_rank
