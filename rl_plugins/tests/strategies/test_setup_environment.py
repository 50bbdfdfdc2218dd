"""setup_environment starts the rollout engine, and Lightning makes the models afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from rl_plugins.ranks import Ranks
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.zero import ZeroStrategy


@pytest.mark.parametrize("strategy", [ZeroStrategy, FSDPStrategy])
def test_setup_environment_prepares_the_engine_once_the_ranks_have_devices_and_a_group(
    monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    """vLLM measures the free memory of a GPU, so the models of training must not be there."""
    calls: list[object] = []

    class OnTwoRanks(strategy):
        root_device, global_rank, world_size = torch.device("cpu"), 1, 2
        accelerator = SimpleNamespace(setup_device=lambda device: calls.append("device"))
        lightning_module = None

        def set_world_ranks(self) -> None:
            """The ranks are those of the class."""

        def setup_distributed(self) -> None:
            calls.append("group")

    def set_up(strategy: Any) -> None:
        calls.extend(["device", "group"])

    class Engine:
        def prepare(self, ranks: Ranks) -> None:
            calls.append((ranks.rank, ranks.world_size))

    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", set_up)
    OnTwoRanks(rollout=Engine()).setup_environment()
    assert calls == ["device", "group", (1, 2)]
