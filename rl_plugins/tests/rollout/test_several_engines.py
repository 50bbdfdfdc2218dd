"""NCCL to several engines: each has ranks of its own, and all enter a call at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("vllm")


def test_engines_have_ranks_of_their_own_and_act_together() -> None:
    from rl_plugins.rollout.vllm.cuda_transport import SeveralEngines

    together = threading.Barrier(2, timeout=20)

    class Client:
        """Every call waits for the other engine's, as a rendezvous does."""

        def __init__(self) -> None:
            self.calls: list[tuple[str, Any]] = []

        def __getattr__(self, method: str) -> Any:
            def call(*arguments: Any) -> None:
                together.wait()
                self.calls.append((method, *arguments))

            return call

    clients = [Client(), Client()]
    several = SeveralEngines(clients, processes=4)
    several.init_weight_transfer_engine({"rank_offset": 1, "world_size": 9})
    several.start_weight_update()
    several.update_weights({"names": ["a"]})
    several.finish_weight_update("3")
    several.set_policy_version(3)
    rest = [("start_weight_update",), ("update_weights", {"names": ["a"]}), ("finish_weight_update", "3")]
    for client, offset in zip(clients, (1, 5), strict=True):
        opened = ("init_weight_transfer_engine", {"rank_offset": offset, "world_size": 9})
        assert client.calls == [opened, *rest, ("set_policy_version", 3)]
