"""Engine of a judge: arguments of vLLM's server, the wait for the start, and a server that ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing.connection import wait
from typing import Any

import pytest

from rl_plugins.addresses import free_port
from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.launch.placement import roles_of
from rl_plugins.rewards import judge_engine
from rl_plugins.rewards.judge_engine import JudgeEngine, JudgeEngineConfig, OnlyJudgePaths
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tests.patience import patient

JUDGE = ("model.path=m", "reward=judge", "reward.judge.model=/models/judge", "placement.judge.actors=2")
Start = Callable[..., JudgeEngine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start an engine in this process, with a stub in the place of vLLM's server."""
    engines: list[JudgeEngine] = []
    monkeypatch.setattr(judge_engine, "_MODULE", "rl_plugins.tests.rewards.judge_engine_stub")
    monkeypatch.setattr(judge_engine, "model_folder", lambda path, **options: path)

    def start(model: str, **options: Any) -> JudgeEngine:
        engines.append(JudgeEngine(JudgeEngineConfig(model, "key", **options), free_port()))
        return engines[-1]

    yield start
    for engine in engines:
        # With this mark, the end of the server would end this process.
        engine._started.clear()
        engine._server.kill()


def test_judge_engine_config_has_the_options_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_engine, "model_folder", lambda path, **options: f"{path}/snapshot")
    config = configured("grpo", *JUDGE, "++placement.judge.vllm.max_model_len=256", "placement.judge.cpus=2")
    config.set_device("cpu")
    engine = JudgeEngineConfig.of(config, "secret")
    assert engine.threads == 2 and "secret" not in repr(engine)
    arguments = engine.arguments
    assert arguments["model"] == "/models/judge/snapshot" and arguments["served_model_name"] == ["/models/judge"]
    # The repository of the model has no part in the settings of sampling.
    assert arguments["generation_config"] == "vllm"
    assert arguments["max_model_len"] == 256 and arguments["enforce_eager"] and arguments["api_key"] == ["secret"]
    module, _, name = arguments["middleware"][0].rpartition(".")
    assert getattr(import_module(module), name) is OnlyJudgePaths
    config = configured("grpo", *JUDGE, "placement.judge.gpus=4")
    config.set_device("cuda")
    arguments = JudgeEngineConfig.of(config, "secret").arguments
    assert arguments["tensor_parallel_size"] == 4 and "enforce_eager" not in arguments
    assert arguments["distributed_executor_backend"].endswith(".OneForAllExecutor")


def test_server_of_a_judge_has_no_other_paths() -> None:
    async def ask(kind: str, path: str) -> list[Any]:
        sent: list[Any] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            sent.append("answered")

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            sent.append(message.get("status", message["type"]))

        await OnlyJudgePaths(app)({"type": kind, "path": path}, receive, send)
        return sent

    for kind, path in (("http", "/health"), ("http", "/v1/chat/completions"), ("lifespan", "")):
        assert asyncio.run(ask(kind, path)) == ["answered"]
    for path in ("/invocations", "/v1/completions", "/tokenize", "/health/", ""):
        assert asyncio.run(ask("http", path)) == [404, "http.response.body"]
    assert asyncio.run(ask("websocket", "/v1/realtime")) == ["websocket.close"]


def test_roles_of_has_a_role_for_the_engines_of_a_judge() -> None:
    config = configured("grpo", *JUDGE, "placement.judge.gpus=4")
    config.set_device("cuda")
    (role,) = (role for role in roles_of(config) if role.name == "judge engines")
    assert (role.count, role.bundle) == (2, {"CPU": 1.0, "GPU": 4.0})
    assert config.model_paths["reward.judge.model"] == "/models/judge"


def test_roles_of_refuses_engines_of_a_judge_without_gpus_on_gpus() -> None:
    config = configured("grpo", *JUDGE, "placement.judge.gpus=0")
    config.set_device("cpu")
    assert "judge engines" in {role.name for role in roles_of(config)}
    config.set_device("cuda")
    with pytest.raises(ConfigError, match=r"^placement\.judge\.gpus=0: .*Set placement\.judge\.gpus=1"):
        roles_of(config)


def test_ready_returns_the_address_of_the_server(start: Start) -> None:
    engine = start("judge", start_timeout_s=patient(60))
    assert engine.ready() == f"http://{engine._host}:{engine._port}/v1"


def test_ready_says_that_the_server_has_ended_before_or_during_the_call(start: Start) -> None:
    for before in (True, False):
        engine = start("broken", start_timeout_s=patient(60))
        if before:
            assert wait([engine._server.ended], patient(60))
        with pytest.raises(ConfigError, match="the model broken ended with exit status 3 at its start"):
            engine.ready()


def test_ready_has_a_deadline(start: Start) -> None:
    with pytest.raises(DeadlineExceeded, match=r"did not start within placement\.judge\.start_timeout_s=0\.1"):
        start("slow", start_timeout_s=0.1).ready()
