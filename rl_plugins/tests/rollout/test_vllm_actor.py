"""VLLMActor on CUDA: sleep of an engine that shares its GPU, weight updates that end early, and routes of experts."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import vllm
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import ConfigError, EngineLost
from rl_plugins.memory import MemoryChange
from rl_plugins.rollout.engine import Generations, GroupRequest
from rl_plugins.rollout.vllm.actor import VLLMActor
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.requests import generations_of


class LLM:
    """Notes the calls of an engine."""

    def __init__(self, **arguments: Any) -> None:
        self.llm_engine, self.calls = self, ["start"]
        self.asleep: set[str] = set()
        # Another process allocates 3 bytes while the engine frees 4 of 6.
        self.memory = [(10, 6, 4), (9, 2, 4)]
        self.to_wake, self.drops_caches = (4, 10), True
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(), is_multimodal_model=False)

    def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    def sleep(self, level: int, mode: str = "abort") -> None:
        self.calls.append(f"sleep {level}" + (f" {mode}" if mode != "abort" else ""))
        self.asleep |= {"weights", "kv_cache"} if level else set()

    def wake_up(self, tags: list[str] | None) -> bool:
        """See `EngineCore.wake_up`."""
        self.calls.append(f"wake_up {tags}")
        self.asleep -= self.asleep if tags is None else set(tags)
        return not self.asleep

    def abort_request(self, names: list[str], internal: bool) -> None:
        assert names == []

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[tuple[int, ...]]:
        if method == "memory_to_wake":
            return [self.to_wake]
        self.calls.append(method)
        return [self.memory["kv_cache" in self.asleep]]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(f"reset_prefix_cache {reset_running_requests} {reset_connector}")
        return self.drops_caches

    def start_weight_update(self) -> None:
        self.calls.append("start_weight_update")

    def finish_weight_update(self, weight_version: str | None) -> None:
        self.calls.append("finish_weight_update")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Start an actor without an engine."""
    monkeypatch.setattr(vllm, "LLM", LLM)
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [])
    return lambda **settings: VLLMActor(VLLMConfig(str(tmp_path), device="cuda", **settings))


def in_session(actor: Any) -> Any:
    asyncio.run(actor.begin_session())
    return actor


@pytest.mark.parametrize(
    ("sleep", "transport", "calls", "unusable"),
    [
        ("all", "ipc", ["keep_unsent_weights", "sleep 2"], "its weights were given back"),
        ("kv_cache", "ipc", ["sleep 1"], None),
        ("none", "ipc", [], None),
        ("all", "nccl", [], None),
    ],
)
def test_vllm_actor_sleeps_at_the_end_of_the_start_on_a_shared_gpu(
    start: Callable[..., Any], sleep: str, transport: str, calls: list[str], unusable: str | None
) -> None:
    actor = start(sleep=sleep, transport=transport)
    assert actor._llm.calls == ["start", "version 0", *calls]
    assert actor._unusable == unusable


def test_vllm_actor_keeps_unfinished_requests_while_a_shared_gpu_is_used_by_training(start: Callable[..., Any]) -> None:
    actor = in_session(start(sleep="all"))
    actor._llm.wake_up(None)
    actor._llm.calls.clear()
    actor._loop._running["request"] = "request"
    change = asyncio.run(actor.sleep())
    assert actor._llm.calls == [
        "sleep 0 keep", "reset_prefix_cache True False", "device_memory", "sleep 2 keep", "device_memory",
    ]  # fmt: skip
    assert change == MemoryChange(before=10, after=6, expected=4)


def test_vllm_actor_continues_unfinished_requests_after_new_weights_and_the_whole_memory(
    start: Callable[..., Any],
) -> None:
    async def held_after_each_call() -> list[bool]:
        await actor.begin_session()
        actor._loop._running["request"] = "request"
        await actor.sleep()
        held = []
        for call in (
            actor.wake_up(["weights"]),
            actor.start_weight_update(),
            actor.finish_weight_update("1"),
            actor.set_policy_version(1),
            actor.wake_up(["kv_cache"]),
        ):
            await call
            held.append(actor._loop._on_hold)
        return held

    actor = start(sleep="all")
    assert asyncio.run(held_after_each_call()) == [True, True, True, True, False]


def test_wake_up_names_the_memory_that_the_engine_needs_and_that_training_leaves_free(
    start: Callable[..., Any],
) -> None:
    actor = in_session(start(sleep="all", gpu_memory_utilization=0.6))
    actor._llm.to_wake = (30 * 2**30, 12 * 2**30)
    with pytest.raises(ConfigError, match=r"utilization=0\.6 .* needs 30\.0 GiB for kv_cache, .* leaves 12\.0 GiB"):
        asyncio.run(actor.wake_up(["kv_cache"]))
    assert "wake_up" not in " ".join(actor._llm.calls)
    actor = in_session(start(sleep="all", vllm={"kv_cache_memory_bytes": 20 * 2**30}))
    actor._llm.to_wake = (30 * 2**30, 12 * 2**30)
    with pytest.raises(ConfigError, match=r"^vllm\.kv_cache_memory_bytes=21474836480 \(in a recipe: rollout\.vllm"):
        asyncio.run(actor.wake_up(["kv_cache"]))


def test_start_weight_update_ends_an_update_that_the_loss_of_another_engine_has_stopped(
    start: Callable[..., Any],
) -> None:
    async def start_twice() -> None:
        await actor.begin_session()
        await actor.start_weight_update()
        await actor.start_weight_update()

    actor = start(sleep="none")
    asyncio.run(start_twice())
    update = ["start_weight_update", "end_weight_update", "start_weight_update"]
    assert [call for call in actor._llm.calls if "version" not in call][-3:] == update


def test_finish_weight_update_drops_the_caches_of_connectors_or_raises(start: Callable[..., Any]) -> None:
    actor = in_session(start(sleep="none"))
    asyncio.run(actor.finish_weight_update("1"))
    assert actor._llm.calls[-2:] == ["finish_weight_update", "reset_prefix_cache True True"]
    asyncio.run(actor.drop_prefixes())
    assert actor._llm.calls[-1] == "reset_prefix_cache False True"
    actor._llm.drops_caches = False
    with pytest.raises(ConfigError, match=r"leave kv_transfer_config and kv_offloading_size out .*rollout\.vllm"):
        asyncio.run(actor.finish_weight_update("2"))


def test_start_without_a_session_is_the_loss_of_the_engine(start: Callable[..., Any]) -> None:
    with pytest.raises(EngineLost, match="Ray has started another one"):
        asyncio.run(start(sleep="none").submit(0, [0, 1], [], SamplingConfig(max_tokens=1)))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("progress", ()),
        ("generate", (0, [0], [[1]], SamplingConfig(max_tokens=1), None)),
        ("submit", (0, [], [GroupRequest(0, [1], 0)], SamplingConfig(max_tokens=1))),
        ("collect", (0, [], 0)),
        ("tokens_so_far", (0, [0])),
        ("fetch", ([(0, 0)],)),
        ("drop", (0, [0])),
        ("drop_prefixes", ()),
        ("init_weight_transfer_engine", ({},)),
        ("start_weight_update", ()),
        ("update_weights", ({},)),
        ("finish_weight_update", ("1",)),
        ("load_adapter", ({}, 1)),
        ("checksums", ([],)),
        ("prompt_log_probs", ([1],)),
        ("set_policy_version", (1,)),
        ("sleep", ()),
        ("wake_up", (None,)),
    ],
)
def test_engine_with_a_refused_restart_is_lost_in_each_call(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str, arguments: tuple[Any, ...]
) -> None:
    def refuse(**_: Any) -> None:
        raise ValueError("no memory for the KV cache")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(vllm, "LLM", refuse)
    actor = start(sleep="none")
    with pytest.raises(ConfigError, match="no memory for the KV cache"):
        asyncio.run(actor.begin_session())
    with pytest.raises(EngineLost):
        asyncio.run(getattr(actor, method)(*arguments))


def test_generations_have_the_experts_of_prompt_and_response() -> None:
    def completion(tokens: list[int], experts: np.ndarray | None) -> CompletionOutput:
        log_probs = FlatLogprobs(logprobs=[-1.0] * len(tokens))
        spans = [WeightVersionSpan(version="3", start=0, end=len(tokens))]
        return CompletionOutput(0, "", tokens, None, log_probs, experts, "stop", weight_versions=spans)

    def generations(*completions: CompletionOutput) -> Generations:
        return generations_of([RequestOutput("0-1", None, [1, 2], None, list(completions), finished=True)])

    # vLLM returns no experts of the last token.
    chosen = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    with_experts = generations(completion([3, 4], chosen), completion([5], chosen[:2]))
    first, second = with_experts.experts
    assert first[:3].tolist() == chosen.tolist() and (first[3] == -1).all()
    assert second[:2].tolist() == chosen[:2].tolist() and (second[2] == -1).all()
    assert generations(completion([3, 4], None)).experts == []
