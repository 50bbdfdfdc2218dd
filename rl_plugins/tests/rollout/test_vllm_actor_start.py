"""VLLMActor on CUDA: an engine that shares its GPU sleeps from its start until the first rollout phase."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

pytest.importorskip("vllm")
import vllm

from rl_plugins.rollout.vllm.actor import VLLMActor
from rl_plugins.rollout.vllm.config import VLLMConfig


class LLM:
    """Notes the calls of an engine."""

    def __init__(self, **arguments: Any) -> None:
        self.llm_engine, self.calls = self, ["start"]

    def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")


@pytest.mark.parametrize(
    ("sleep", "transport", "calls", "unusable"),
    [
        ("all", "ipc", ["sleep 2"], "its weights were given back"),
        ("kv_cache", "ipc", ["sleep 1"], None),
        ("none", "ipc", [], None),
        ("all", "nccl", [], None),
    ],
)
def test_vllm_actor_sleeps_at_the_end_of_the_start_on_a_shared_gpu(
    monkeypatch: pytest.MonkeyPatch, sleep: str, transport: str, calls: list[str], unusable: str | None
) -> None:
    monkeypatch.setattr(vllm, "LLM", LLM)
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [])
    actor: Any = VLLMActor(VLLMConfig("model", device="cuda", sleep=sleep, transport=transport))
    assert actor._llm.calls == ["start", "version 0", *calls]
    assert actor._unusable == unusable
