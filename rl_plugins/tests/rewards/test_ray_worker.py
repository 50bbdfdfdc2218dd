"""Reward workers that are actors of Ray: their GPUs, and a start on a lost machine."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rl_plugins.errors import ConfigError, RewardError
from rl_plugins.rewards import pool as pool_module
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.ray_worker import RayWorker
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.worker import WorkerTask
from rl_plugins.tests.loops import for_each


@for_each(("gpus", "variables"), [(0.0, {"CUDA_VISIBLE_DEVICES": ""}), (0.5, {})])
def test_ray_worker_without_a_share_of_a_gpu_sees_no_gpu(gpus: float, variables: dict[str, str]) -> None:
    """Ray shows all GPUs of the machine to an actor that reserves none."""
    asked: dict[str, Any] = {}

    class Actor:
        @staticmethod
        def options(**options: Any) -> Any:
            asked.update(options)
            return SimpleNamespace(remote=lambda: SimpleNamespace(load=SimpleNamespace(remote=lambda task: None)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "remote", lambda cls: Actor)
        patch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "0" * 56))
        RayWorker(WorkerTask({}, WorkerLimits.of((), None), gpus), start_timeout_s=60)
    assert asked["num_gpus"] == gpus and asked["runtime_env"] == {"env_vars": variables}


def test_score_starts_a_worker_again_whose_machine_ended_before_the_rewards_were_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any other loss of a worker that loads its rewards is a fault of the reward, and so is the fourth such loss."""
    monkeypatch.setattr(pool_module, "_kind_of_workers", lambda: RayWorker)
    monkeypatch.setattr(RayWorker, "launch", lambda worker: setattr(worker, "_result", "loaded"))
    monkeypatch.setattr(RayWorker, "submit", lambda worker, requests, s: setattr(worker, "_result", [Score(1.0)]))
    monkeypatch.setattr(RayWorker, "wait", staticmethod(lambda workers, s: workers))
    monkeypatch.setattr(RayWorker, "kill", lambda worker: None)

    def died(message: str) -> ActorDiedError:
        # Generated code has no types.
        context: Any = import_module("ray.core.generated.common_pb2").ActorDiedErrorContext
        return ActorDiedError(context(error_message=message, actor_id=bytes(16), never_started=True))

    machine_lost = died("The actor died because its node has died.")
    losses: list[Exception] = [ActorUnavailableError("the machine does not answer", None), machine_lost]

    def get(result: object, timeout: float) -> object:
        if result == "loaded" and losses:
            raise losses.pop()
        return None if result == "loaded" else result

    monkeypatch.setattr(ray, "get", get)
    request = ScoringRequest(data_source="s", solution_str="1", ground_truth="1", extra_info={})
    target = {"_target_": "rl_plugins.tests.rewards.sample_rewards.obey"}
    with RewardPool(target, num_workers=1, deadline_s=1.0) as pool:
        assert [score.value for score in pool.score([request])] == [1.0] and losses == []
    died_loading = pytest.raises(RewardError, match="died while it loaded")
    for fatal in ([died("The actor's process was killed.")], [machine_lost] * 4):
        losses += fatal
        with RewardPool(target, num_workers=1, deadline_s=1.0) as pool, died_loading:
            pool.score([request])
    losses += [ConfigError("there is no such reward"), machine_lost]
    with RewardPool(target, num_workers=1, deadline_s=1.0) as pool, pytest.raises(ConfigError, match="no such reward"):
        pool.score([request])
