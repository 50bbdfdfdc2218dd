"""EngineLoop and VLLMActor: requests are held, ended and forgotten while ranks wait for the responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessor

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.images import PromptImages
from rl_plugins.errors import DataError
from rl_plugins.rollout.vllm.actor import VLLMActor
from rl_plugins.rollout.vllm.engine_loop import EngineLoop
from rl_plugins.rollout.vllm.requests import EngineRequest, sampling_parameters
from rl_plugins.tests.patience import patient


class LLM:
    """An engine, which finishes the requests in `finishing` in a step, and records other calls."""

    def __init__(self) -> None:
        self.llm_engine, self.renderer = self, None
        self.finishing: set[str] = set()
        self.requests: list[str] = []
        self.calls: list[str] = []
        self.is_awake = True
        self.model_config = SimpleNamespace(is_multimodal_model=False)

    def add_request(self, name: str, *_: Any, **__: Any) -> str:
        self.requests.append(name)
        return name

    def abort_request(self, names: Sequence[str], internal: bool = False) -> None:
        self.requests = [name for name in self.requests if name not in names]

    def step(self) -> list[Any]:
        assert self.requests, "an engine without requests may never answer"
        done = [name for name in self.requests if name in self.finishing]
        self.abort_request(done)
        return [_output(name) for name in done]

    def sleep(self, level: int, mode: str) -> None:
        self.calls.append(f"sleep {level} {mode}")

    def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(f"wake_up {tags}")
        return self.is_awake

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        self.calls.append(f"reset {reset_running_requests}")
        return reset_running_requests or not self.requests

    def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        self.calls += [method] if method == "end_weight_update" else []
        return []


class Core:
    """An engine core that notes its requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        self.requests.append(request.request_id)

    def abort_requests(self, requests: Sequence[str]) -> None:
        for request in requests:
            self.requests.remove(request)


def vllm_engine() -> Any:
    """Return vLLM's engine with vLLM's records of requests, and without a model."""

    def request(name: str, prompt: Any, parameters: SamplingParams, **_: Any) -> EngineCoreRequest:
        if name == "refused":
            raise ValueError("no place for the request")
        return EngineCoreRequest(name, prompt["prompt_token_ids"], None, parameters, None, 0.0, None, None, None)

    engine: Any = LLMEngine.__new__(LLMEngine)
    engine.renderer, engine.engine_core, engine.output_processor = None, Core(), OutputProcessor(None, log_stats=False)
    engine.input_processor = SimpleNamespace(process_inputs=request, assign_request_id=InputProcessor.assign_request_id)
    engine.model_config, engine._supported_tasks = SimpleNamespace(is_encoder_decoder=False), ()
    return engine


def records_of(engine: Any) -> list[Any]:
    """Return all requests in vLLM's records."""
    processor = engine.output_processor
    records = (processor.request_states, processor.parent_requests, processor.external_req_ids)
    return [*engine.engine_core.requests, *(record for kind in records for record in kind)]


def _output(name: str) -> Any:
    return SimpleNamespace(request_id=name, finished=True, outputs=[SimpleNamespace(token_ids=[1, 2])])


def actor_with(llm: Any) -> Any:
    actor: Any = VLLMActor.__new__(VLLMActor)
    actor._llm, actor._loop, actor._config = llm, EngineLoop(llm), SimpleNamespace(sleep="kv_cache", device="cpu")
    actor._groups, actor._collected, actor._barrier = {}, {}, SimpleNamespace(cancel=lambda: None)
    actor._updating, actor._in_session, actor._unusable, actor._image_token_id = False, True, None, None
    actor._refusal = None
    return actor


def submit_groups(actor: Any, *tickets: int) -> None:
    """Submit groups as `submit` does for rank 0."""
    names = [f"0-{ticket}" for ticket in tickets]
    actor._loop.start(dict.fromkeys(names, EngineRequest([1], None)))
    actor._groups.setdefault(0, []).extend(names)


async def give_turns() -> None:
    """Let all other tasks of the event loop run until each of them waits; no task needs as many turns."""
    for _ in range(100):
        await asyncio.sleep(0)


async def result_of(task: asyncio.Task[Any]) -> Any:
    return await asyncio.wait_for(task, patient(60))


def test_start_adds_no_request_if_the_engine_makes_other_tokens_of_the_images() -> None:
    llm: Any = LLM()
    llm.renderer = SimpleNamespace(process_for_engine=lambda prompt, now: {"prompt_token_ids": [1, 9]})
    loop = EngineLoop(llm)
    with_images = EngineRequest([1, 9, 9], None, PromptImages({}, [], [1, 9], 3))
    with pytest.raises(DataError, match=r"makes 2 tokens .* makes 3 tokens, .*TransformersRollout \(in a recipe: "):
        loop.start({"text": EngineRequest([1], None), "images": with_images})
    assert llm.requests == [] and not loop.busy


def test_abort_leaves_nothing_of_requests_with_several_responses_in_the_engine() -> None:
    async def run() -> None:
        engine = vllm_engine()
        loop = EngineLoop(SimpleNamespace(llm_engine=engine))
        loop.hold()
        requests = {
            f"0-{n}": EngineRequest([1, 2], sampling_parameters(SamplingConfig(max_tokens=3, num_samples=n), 1, None))
            for n in (1, 3)
        }
        loop.start(requests)
        assert len(engine.engine_core.requests) == 4
        # One of three responses is finished.
        (first, *_) = [name for name in engine.engine_core.requests if name.startswith("0_")]
        engine.engine_core.requests.remove(first)
        ended = EngineCoreOutput(first, [], finish_reason=FinishReason.LENGTH)
        assert not engine.output_processor.process_outputs([ended]).request_outputs
        loop.abort(["0-1", "0-3"])
        assert not records_of(engine) and not loop.busy
        with pytest.raises(ValueError, match="no place for the request"):
            loop.start({**requests, "refused": EngineRequest([1], SamplingParams())})
        assert not records_of(engine) and not loop.busy
        await loop.go_on()

    asyncio.run(run())


def test_abort_removes_failures_and_a_later_request_of_the_same_name_is_waited_for() -> None:
    async def run() -> None:
        llm = LLM()
        loop = EngineLoop(llm)
        loop.start({"one": EngineRequest([1], None), "two": EngineRequest([1], None)})
        with patch.object(llm, "step", side_effect=RuntimeError("no memory")):
            await give_turns()
        with pytest.raises(RuntimeError, match="no memory"):
            await loop.wait(["one"], ["one"], 0)
        loop.abort(["two"])
        llm.finishing = {"two"}
        loop.start({"two": EngineRequest([1], None)})
        assert list(await asyncio.wait_for(loop.wait(["two"], ["two"], 0), patient(60))) == ["two"]

    asyncio.run(run())


def test_hold_pauses_an_engine_with_requests_and_no_step_is_taken_until_go_on() -> None:
    async def run() -> None:
        llm = LLM()
        loop = EngineLoop(llm)
        loop.hold()
        await loop.go_on()
        assert llm.calls == []
        loop.start({"one": EngineRequest([1], None)})
        await asyncio.sleep(0)
        loop.hold()
        loop.hold()
        await give_turns()
        steps = loop.steps
        assert steps > 0
        await give_turns()
        assert loop.steps == steps
        loop.abort()
        await loop.go_on()
        await give_turns()
        assert llm.calls == ["sleep 0 keep", "wake_up ['scheduling']"]
        assert loop.steps == steps and not loop.busy
        assert loop._failures == {}

    asyncio.run(run())


def test_go_on_takes_no_step_while_memory_of_the_engine_is_asleep() -> None:
    async def run() -> None:
        llm = LLM()
        loop = EngineLoop(llm)
        loop.start({"one": EngineRequest([1], None)})
        await give_turns()
        loop.hold()
        llm.is_awake, steps = False, loop.steps
        await loop.go_on()
        await give_turns()
        assert loop.steps == steps
        llm.is_awake, llm.finishing = True, {"one"}
        await loop.go_on()
        assert list(await asyncio.wait_for(loop.wait(["one"], ["one"], 0), patient(60))) == ["one"]

    asyncio.run(run())


def test_wait_returns_the_required_requests_alone_if_no_number_is_given() -> None:
    async def run() -> None:
        llm = LLM()
        loop = EngineLoop(llm)
        llm.finishing = {"one", "two"}
        loop.start({name: EngineRequest([1], None) for name in ("one", "two")})
        await give_turns()
        assert list(await loop.wait(["one", "two"], ["two"], 0)) == ["two"]
        assert list(await loop.wait(["one"], [], 0)) == ["one"]

    asyncio.run(run())


def test_begin_session_ends_the_waits_of_the_workers_before() -> None:
    async def run() -> None:
        llm = LLM()
        actor = actor_with(llm)
        submit_groups(actor, 0)
        before = asyncio.create_task(actor.collect(0, [0], 0))
        await give_turns()
        actor._loop._failures["0-0"] = RuntimeError("of the workers before")
        await actor.begin_session()
        submit_groups(actor, 0)
        now = asyncio.create_task(actor.collect(0, [0], 0))
        llm.finishing = {"0-0"}
        assert (await result_of(now))[0] == {0: [2]}
        with pytest.raises(RuntimeError, match="other training workers have begun"):
            await result_of(before)

    asyncio.run(run())


def test_collect_returns_a_group_that_was_submitted_after_all_groups_were_dropped() -> None:
    async def run() -> None:
        llm = LLM()
        actor = actor_with(llm)
        submit_groups(actor, 0, 1)
        collecting = asyncio.create_task(actor.collect(0, [], 1))
        await give_turns()
        await actor.drop(0, [0, 1])
        submit_groups(actor, 2, 3)
        llm.finishing = {"0-3"}
        assert (await result_of(collecting))[0] == {3: [2]}
        assert actor._groups[0] == ["0-2"]

    asyncio.run(run())


def test_collect_returns_groups_with_negative_tickets() -> None:
    async def run() -> None:
        llm = LLM()
        actor = actor_with(llm)
        submit_groups(actor, -1, -2)
        llm.finishing = {"0--1", "0--2"}
        assert (await actor.collect(0, [-1, -2], 2))[0] == {-1: [2], -2: [2]}

    asyncio.run(run())


def test_sleep_holds_unfinished_requests_until_go_on() -> None:
    async def run() -> None:
        llm = LLM()
        actor = actor_with(llm)
        submit_groups(actor, 0)
        collecting = asyncio.create_task(actor.collect(0, [0], 0))
        await give_turns()
        await actor.sleep()
        assert llm.calls == ["sleep 0 keep", "reset True"]
        llm.finishing = {"0-0"}
        await give_turns()
        assert not collecting.done()
        # A later weight update would call this, too.
        await actor._loop.go_on()
        assert (await result_of(collecting))[0] == {0: [2]}

    asyncio.run(run())


def test_start_weight_update_ends_an_update_that_stopped_with_the_loss_of_another_engine() -> None:
    llm = LLM()
    llm.start_weight_update = lambda: llm.calls.append("start")  # type: ignore[attr-defined]

    async def run() -> None:
        actor = actor_with(llm)
        await actor.start_weight_update()
        await actor.start_weight_update()

    asyncio.run(run())
    assert llm.calls == ["start", "end_weight_update", "start"]
