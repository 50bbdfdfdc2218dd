"""Fleet: the engines of a rank, the prompts of each engine, and models that an engine cannot run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.fleet import Deadline, Fleet, assigned_range, split_prompts
from rl_plugins.weights.source import ModuleWeightSource

pytestmark = pytest.mark.unit

NUMBERS = [(1, 1), (2, 1), (1, 3), (4, 2), (4, 3), (3, 5), (7, 4)]


def test_assigned_range_is_symmetric_and_covers_every_rank_and_engine() -> None:
    for ranks, engines in NUMBERS:
        one_way = {(rank, engine) for rank in range(ranks) for engine in assigned_range(rank, ranks, engines)}
        other_way = {(rank, engine) for engine in range(engines) for rank in assigned_range(engine, engines, ranks)}
        assert one_way == other_way, (ranks, engines)
        assert {rank for rank, _ in one_way} == set(range(ranks)), (ranks, engines)
        assert {engine for _, engine in one_way} == set(range(engines)), (ranks, engines)


def test_split_prompts_gives_every_prompt_one_engine_and_engines_equal_loads() -> None:
    for ranks, engines in NUMBERS:
        for count in (0, 1, 5, 12):
            case = f"{ranks} ranks, {engines} engines, {count} prompts"
            of_engine: Counter[int] = Counter()
            for rank in range(ranks):
                parts = split_prompts(rank, ranks, engines, count)
                assert list(parts) == list(assigned_range(rank, ranks, engines)), case
                assert [prompt for part in parts.values() for prompt in part] == list(range(count)), case
                of_engine.update({engine: len(part) for engine, part in parts.items()})
            if count == 12:
                assert max(of_engine.values()) - min(of_engine.values()) <= 2, case


def test_start_refuses_heads_without_a_kernel_on_cpu_before_an_actor_starts(tmp_path: Path) -> None:
    model = str(save_tiny_policy(tmp_path, hidden_size=64, num_heads=4))
    with pytest.raises(ConfigError, match=r"a width of 16, and vLLM on CPU has kernels for 32, 64"):
        VLLMRollout(VLLMConfig(model)).start()


def test_engines_on_gpus_may_be_silent_for_longer_before_their_first_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(calls: list[str], timeout: float) -> tuple[list[str], list[str]]:
        """Return no call at first, so that the fleet asks the engines for an answer."""
        waits.append(timeout)
        return (calls if len(waits) > 1 else []), []

    monkeypatch.setattr(ray, "wait", wait)
    actor: Any = SimpleNamespace(
        **{name: SimpleNamespace(remote=lambda: None) for name in ("progress", "begin_session")}
    )

    def timeouts(*engines: int) -> list[float]:
        """Timeouts of the first wait for a call of each engine, and of the answers of the engines."""
        waits.clear()
        fleet.first({f"call {engine}": engine for engine in engines}, "update", Deadline(5000))
        return waits[:-1]

    def fleet_of(device: str, transport: str) -> Fleet:
        fleet = Fleet(VLLMConfig("model", device=device, transport=transport), "name", 2, 1.0)
        fleet.actors, fleet.world_size = {0: actor, 1: actor}, 2
        monkeypatch.setattr(fleet, "result", lambda engine, reference, timeout_s: waits.append(timeout_s))
        return fleet

    fleet = fleet_of("cpu", "gloo")
    assert timeouts(0) == [120, 120]
    fleet = fleet_of("cuda", "nccl")
    rollout, source = VLLMRollout(fleet.config), ModuleWeightSource(torch.nn.Linear(1, 1))
    monkeypatch.setattr(rollout, "_fleet", fleet)
    monkeypatch.setattr(rollout, "_sender", SimpleNamespace(send=lambda version: None))
    assert timeouts(0) == timeouts(1) == [900, 900]
    fleet.mark_warm(0)
    # Engine 1 samples for rank 1 alone. Rank 0 calls the engine in a weight update.
    assert (timeouts(0), timeouts(1)) == ([120, 120], [900, 900])
    with monkeypatch.context() as patch:
        patch.setattr("rl_plugins.rollout.vllm.fleet.gather", lambda warm: [warm, {1}])
        rollout.update_weights(source, version=1)
    assert timeouts(0) == timeouts(1) == [120, 120]
    # Engine 1 is lost and starts again, and engine 0 samples for both ranks meanwhile.
    fleet.mark_lost(1, silent=False)
    fleet.drop_lost()
    fleet.mark_warm(0)
    fleet.returning.clear()
    fleet.living.append(1)
    assert (timeouts(0), timeouts(1)) == ([120, 120], [900, 900])
    rollout.update_weights(source, version=2)
    assert timeouts(1) == [900, 900]
    fleet.mark_warm(1)
    assert timeouts(1) == [120, 120]


def test_drop_lost_ends_lost_engines_on_the_gpus_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[Any, bool]] = []
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append((actor, no_restart)))
    fleet = Fleet(VLLMConfig("model", device="cuda", transport="ipc"), "name", 2, 0)
    fleet._labels, fleet.actors = {0: "name-0", 1: "name-1"}, {0: "first", 1: "second"}
    for rank, ended in ((0, [("first", True)]), (1, [])):
        killed.clear()
        fleet.rank, fleet.living = rank, [0, 1]
        fleet.mark_lost(0, silent=False)
        assert fleet.drop_lost() == 1 and fleet.living == [1] and killed == ended


def test_loss_of_an_engine_is_logged_once_with_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet(VLLMConfig("model"), "name", 2, 0)
    fleet.mark_lost(0, silent=False, cause=OSError("the process has no memory\ndetails"))
    fleet.mark_lost(0, silent=False)
    fleet.mark_lost(1, silent=True)
    fleet._lost.clear()
    fleet.mark_lost(1, silent=True, cause=TimeoutError("waited 7 s in the update"))
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0 has lost vLLM engine name-0: the process has no memory",
        "rank 0 has lost vLLM engine name-1: no answer for 120 s",
        "rank 0 has lost vLLM engine name-1: waited 7 s in the update",
    ]


def test_prepare_refuses_engines_of_each_rank() -> None:
    rollout = VLLMRollout(VLLMConfig("model"), name="mine")
    ranks: Any = SimpleNamespace(gather=lambda name: [name, "other"])
    with pytest.raises(ConfigError, match=r"every rank has rollout engines of its own: use RayZeroStrategy"):
        rollout.prepare(ranks)


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> Restarts:
    """A fleet of two engines on CPU, of which engine 1 starts again. Each call of Ray has an answer at once."""
    ready = Restarts()
    monkeypatch.setattr(ray, "wait", lambda calls, num_returns, timeout: (calls, []))
    monkeypatch.setattr(ray, "get", ready.get)
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: ready.calls.append(f"kill, {no_restart=}"))
    return ready


class Restarts:
    """The answers of engine 1, and the calls of the engine."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.answers: list[Exception | None] = []
        self.fleet = Fleet(VLLMConfig("model"), "name", 2, 0)
        engine = SimpleNamespace(begin_session=SimpleNamespace(remote=self.begin_session))
        self.fleet.actors = {0: SimpleNamespace(), 1: engine}
        self.fleet.mark_lost(1, silent=False)
        self.fleet.drop_lost()

    def begin_session(self) -> str:
        self.calls.append("begin_session")
        return f"call {len(self.calls)}"

    def get(self, call: str) -> None:
        if (answer := self.answers.pop(0)) is not None:
            raise answer


def refused() -> Exception:
    return ray.exceptions.RayTaskError("begin_session", "", ConfigError("no memory")).as_instanceof_cause()


def test_add_restarted_lets_an_engine_start_anew_after_a_refused_restart(restarts: Restarts) -> None:
    restarts.answers = [refused(), None]
    assert not restarts.fleet.add_restarted() and restarts.fleet.living == [0]
    assert restarts.calls == ["begin_session", "kill, no_restart=False", "begin_session"]
    assert restarts.fleet.add_restarted() and restarts.fleet.living == [0, 1]


def test_session_after_leave_has_the_engines_that_start_again(restarts: Restarts) -> None:
    restarts.answers = [refused()]
    restarts.fleet.leave()
    assert restarts.calls[:2] == ["begin_session", "kill, no_restart=False"]
    assert restarts.fleet.living == [0, 1] and not restarts.fleet.returning and not restarts.fleet.actors


def test_start_refuses_updates_without_the_experts_before_an_actor_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "head_dim": 64}))
    rollout = VLLMRollout(VLLMConfig(str(tmp_path), device="cuda", dtype="bfloat16"))
    with pytest.raises(ConfigError, match="on GPUs, weight updates of vLLM do not reach the experts of models of the"):
        rollout.start()


def test_start_names_a_damaged_config_json_before_an_actor_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": ')
    with pytest.raises(ConfigError, match=r"config.json: not valid JSON"):
        VLLMRollout(VLLMConfig(str(tmp_path))).start()
