"""train_on_ray on GPUs: the workers and engines that the launcher asks for, without Ray, GPUs and vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train.torch

from rl_plugins.errors import ConfigError
from rl_plugins.launch import ray_train
from rl_plugins.rollout.vllm.client import VLLMRollout
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.launch.configurations import configured

NODES = [
    {"NodeID": address, "NodeManagerAddress": address, "Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}}
    for address in ("10.0.0.1", "10.0.0.2")
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `train` asks of Ray, of the check of the machines and of the engines."""
    asked: dict[str, Any] = {"order": []}

    class Trainer:
        def __init__(self, train: Any, **options: Any) -> None:
            asked.update(options)

        def fit(self) -> None:
            asked["order"].append("fit")

    class Places:
        def options(self, role: Any) -> list[str]:
            return [f"place {number}" for number in range(role.count)]

        def release(self, role: str) -> None:
            asked["order"].append(f"release {role}")

    @contextmanager
    def reserve(roles: Any, *_: Any) -> Iterator[Places]:
        asked["order"].append("reserve")
        yield Places()

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.setattr(ray.train.torch, "TorchTrainer", Trainer)
    monkeypatch.setattr(ray_train, "set_own_ray_up", lambda: None)
    monkeypatch.setattr(ray_train, "reserved", reserve)
    monkeypatch.setattr(ray_train, "wait_until_project_is_unpacked", lambda *_: None)
    monkeypatch.setattr(ray_train, "check_nodes", lambda config, nodes: asked["order"].append(f"check {len(nodes)}"))
    monkeypatch.setattr("rl_plugins.launch.ray_train.stop_on_signals", lambda folder: nullcontext())
    monkeypatch.setattr(VLLMRollout, "start", lambda self, places=(): asked["order"].append(f"start {list(places)}"))
    monkeypatch.setattr(ray_train, "os", SimpleNamespace(environ={}))
    return asked


def train(tmp_path: Path, *overrides: str) -> None:
    config = configured("grpo", "model.path=none", "placement.device=cuda", *overrides)
    (tmp_path / "run").mkdir()
    ray_train.train_on_ray(config, RunFolder(tmp_path / "run"))


def test_train_asks_for_a_gpu_for_each_worker_and_starts_no_colocated_engine(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    train(tmp_path, "placement.num_workers=16", "rollout.tensor_parallel_size=2", "strategy.collective_timeout_s=77")
    assert asked["order"] == ["reserve", "check 2", "release training workers", "fit"]
    scaling, torch_config = asked["scaling_config"], asked["torch_config"]
    assert (scaling.num_workers, scaling.use_gpu, scaling.resources_per_worker["GPU"]) == (16, True, 1.0)
    assert (torch_config.backend, torch_config.timeout_s) == ("nccl", 77)
    rollout = asked["train_loop_config"]["rollout"]
    assert (rollout.config.backend, rollout.config.shares_gpus, rollout.config.sleep) == ("ipc", True, "all")


def test_train_starts_split_engines_on_their_own_gpus_before_the_workers(asked: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path, "placement.rollout=split", "rollout.engines=2", "rollout.tensor_parallel_size=4")
    assert asked["order"] == [
        "reserve", "check 2", "start ['place 0', 'place 1']", "release training workers", "fit",
    ]  # fmt: skip
    rollout = asked["train_loop_config"]["rollout"]
    assert (rollout.config.backend, rollout.config.sleeps, rollout._fleet._num_gpus) == ("nccl", False, 4)


def test_train_releases_the_gpus_of_reward_workers_before_the_workers_start(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    train(tmp_path, "reward.gpus=0.5")
    assert asked["order"] == ["reserve", "check 2", "release training workers", "release reward workers", "fit"]


def test_train_ends_the_rollout_engines_if_a_judge_does_not_start(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def addresses_of(judges: Any, timeout_s: float) -> list[str]:
        raise ConfigError("the judge ended")

    monkeypatch.setattr(ray_train, "addresses_of", addresses_of)
    monkeypatch.setattr(VLLMRollout, "stop", lambda self: asked["order"].append("stop"))
    with pytest.raises(ConfigError, match="the judge ended"):
        train(tmp_path, "placement.rollout=split")
    assert asked["order"][0] == "reserve" and asked["order"][-1] == "stop" and "fit" not in asked["order"]
