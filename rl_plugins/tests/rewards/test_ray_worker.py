"""GPUs of reward workers that are actors of Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.ray_worker import RayWorker
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
