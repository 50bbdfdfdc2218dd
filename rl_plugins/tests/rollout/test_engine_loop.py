"""Requests that are held, ended and forgotten while others wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from rl_plugins.rollout.vllm.actor import VLLMActor
from rl_plugins.rollout.vllm.engine_loop import EngineLoop


class LLM:
    """An engine that finishes a request in a step when it is told to, and notes what else it is told."""

    def __init__(self) -> None:
        self.llm_engine = self
        self.finishing: set[str] = set()
        self.requests: list[str] = []
        self.told: list[str] = []

    def add_request(self, name: str, *_: Any, **__: Any) -> None:
        self.requests.append(name)

    def abort_request(self, names: Sequence[str]) -> None:
        self.requests = [name for name in self.requests if name not in names]

    def step(self) -> list[Any]:
        assert self.requests, "an engine without requests may never answer"
        done = [name for name in self.requests if name in self.finishing]
        self.abort_request(done)
        return [_output(name) for name in done]

    def sleep(self, level: int, mode: str) -> None:
        self.told.append(f"sleep {level} {mode}")

    def wake_up(self, tags: list[str]) -> None:
        self.told.append(f"wake_up {tags}")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.told.append(f"reset {reset_running_requests}")
        return reset_running_requests or not self.requests

    def collective_rpc(self, method: str, args: Sequence[Any]) -> list[Any]:
        return []


def _output(name: str) -> Any:
    return SimpleNamespace(request_id=name, finished=True, outputs=[SimpleNamespace(token_ids=[1, 2])])


def actor_with(llm: Any) -> Any:
    actor: Any = VLLMActor.__new__(VLLMActor)
    actor._llm, actor._loop, actor._config = llm, EngineLoop(llm), SimpleNamespace(sleep="kv_cache", device="cpu")
    actor._groups, actor._held, actor._round = {}, {}, SimpleNamespace(cancel=lambda: None)
    actor._updating, actor._in_session, actor._unusable = False, True, None
    return actor


def begin(actor: Any, *tickets: int) -> None:
    """As `submit` does for rank 0."""
    names = [f"0-{ticket}" for ticket in tickets]
    actor._loop.start(dict.fromkeys(names, ([1], None)))
    actor._groups.setdefault(0, []).extend(names)


def test_a_held_engine_is_paused_if_it_has_requests_and_takes_no_step_without() -> None:
    async def run() -> None:
        llm = LLM()
        loop = EngineLoop(llm)
        loop.hold()
        await loop.go_on()
        assert llm.told == []
        loop.start({"one": ([1], None)})
        await asyncio.sleep(0)
        loop.hold()
        loop.hold()
        await asyncio.sleep(0.01)
        steps = loop.steps
        await asyncio.sleep(0.01)
        assert loop.steps == steps
        loop.abort()
        await loop.go_on()
        await asyncio.sleep(0.01)
        assert llm.told == ["sleep 0 keep", "wake_up ['scheduling']"]
        assert loop.steps == steps and not loop.busy
        assert loop._failures == {}

    asyncio.run(run())


def test_new_workers_are_not_given_to_those_that_wait_since_before() -> None:
    async def run() -> None:
        llm = LLM()
        actor = actor_with(llm)
        begin(actor, 0)
        before = asyncio.create_task(actor.collect(0, [0], 0))
        await asyncio.sleep(0.01)
        actor._loop._failures["0-0"] = RuntimeError("of those before")
        await actor.begin_session()
        begin(actor, 0)
        now = asyncio.create_task(actor.collect(0, [0], 0))
        llm.finishing = {"0-0"}
        assert (await now)[0] == {0: [2]}
        with pytest.raises(RuntimeError, match="other training workers have begun"):
            await before

    asyncio.run(run())


def test_whoever_waits_for_any_group_is_given_those_that_come_after_others_were_dropped() -> None:
    async def run() -> None:
        llm = LLM()
        actor = actor_with(llm)
        begin(actor, 0, 1)
        poll = asyncio.create_task(actor.collect(0, [], 1))
        await asyncio.sleep(0.01)
        await actor.drop(0, [0, 1])
        begin(actor, 2, 3)
        llm.finishing = {"0-3"}
        assert (await asyncio.wait_for(poll, 5))[0] == {3: [2]}
        assert actor._groups[0] == ["0-2"]

    asyncio.run(run())


def test_an_engine_sleeps_beside_a_lost_one_and_its_requests_begin_again() -> None:
    async def run() -> None:
        llm = LLM()
        actor = actor_with(llm)
        begin(actor, 0)
        waiting = asyncio.create_task(actor.collect(0, [0], 0))
        await asyncio.sleep(0.01)
        await actor.sleep()
        assert llm.told == ["sleep 0 keep", "reset True"]
        llm.finishing = {"0-0"}
        await asyncio.sleep(0.01)
        assert not waiting.done()
        # As the weight update does that follows.
        await actor._loop.go_on()
        assert (await asyncio.wait_for(waiting, 5))[0] == {0: [2]}

    asyncio.run(run())
