"""setup_environment starts the rollout engine before Lightning makes the models; ranks wait on their hosts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from rl_plugins import ranks
from rl_plugins.ranks import Ranks
from rl_plugins.strategies.fsdp import FSDPStrategy
from rl_plugins.strategies.zero import ZeroStrategy
from rl_plugins.tests.stages import canned


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

    class Engine(canned.CannedRollout):
        @override
        def prepare(self, ranks: Ranks) -> None:
            calls.append((ranks.rank, ranks.world_size))

    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", set_up)
    OnTwoRanks(rollout=Engine()).setup_environment()
    assert calls == ["device", "group", (1, 2)]


@pytest.mark.parametrize("strategy", [ZeroStrategy, FSDPStrategy])
def test_barrier_and_broadcast_of_lightning_go_over_the_hosts(monkeypatch: pytest.MonkeyPatch, strategy: Any) -> None:
    """A wait of NCCL would be a kernel, which takes time of the GPU from the rollout engine."""
    calls: list[object] = []

    def broadcast_objects(box: list[object], src: int, group: object) -> None:
        calls.append((src, group))
        box[0] = "from another rank"

    monkeypatch.setattr(ranks, "_hosts", (torch.distributed.group.WORLD, "hosts"))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(torch.distributed, "barrier", lambda group=None, device_ids=None: calls.append(group))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast_objects)
    made = strategy()
    made.barrier("checkpoint written")
    assert made.broadcast("own", 1) == "from another rank"
    assert calls == ["hosts", (1, "hosts")]
