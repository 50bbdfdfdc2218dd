"""SeveralEngines and make_cuda_sender: engines have separate ranks, calls are made at once, every tensor fits."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from rl_plugins.tests.patience import patient

pytest.importorskip("vllm")


def test_several_engines_calls_all_engines_at_once_with_separate_ranks() -> None:
    from rl_plugins.rollout.vllm.cuda_transport import SeveralEngines

    together = threading.Barrier(2, timeout=patient(60))

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


def test_several_engines_opens_ipc_without_ranks_in_a_group() -> None:
    from rl_plugins.rollout.vllm.cuda_transport import SeveralEngines

    opened: list[Any] = []
    client = SimpleNamespace(init_weight_transfer_engine=opened.append)
    SeveralEngines([client, client], processes=2).init_weight_transfer_engine({"packed": True})
    assert opened == [{"packed": True}, {"packed": True}]


@pytest.mark.parametrize(("backend", "bucket_bytes"), [("ipc", 4 * 600 * 1024), ("nccl", 2**20)])
def test_make_cuda_sender_makes_a_buffer_that_holds_the_largest_tensor(
    monkeypatch: pytest.MonkeyPatch, backend: Any, bucket_bytes: int
) -> None:
    from rl_plugins.rollout.vllm import cuda_transport
    from rl_plugins.rollout.vllm.config import VLLMConfig
    from rl_plugins.weights.source import ModuleWeightSource

    seen: list[Any] = []
    for sender in ("IpcSender", "NcclSender"):
        monkeypatch.setattr(cuda_transport, sender, lambda info, **_: seen.append(info))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    source = ModuleWeightSource(torch.nn.Embedding(600, 1024))
    config = VLLMConfig("model", device="cuda", transport=backend, bucket_mb=1)
    cuda_transport.make_cuda_sender(config, source, client=None, rank=0)
    assert bucket_bytes == (seen[0].bucket_bytes if backend == "nccl" else seen[0].packed_buffer_size_bytes)
    assert backend == "ipc" or seen[0].host == "10.0.0.7"
