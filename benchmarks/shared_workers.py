"""Several runs one after the other on one Ray cluster, one group of workers and the vLLM engines of the first.

What a recipe does, without its start: for comparisons of many short runs. The runs do not restart after a failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rl_plugins.launch.config import RecipeConfig, parse_config
from rl_plugins.launch.preflight import preflight
from rl_plugins.launch.values import generates
from rl_plugins.run_folder import RunFolder


def train_in_turn(configs: Sequence[RecipeConfig], storage: Path) -> None:
    """Check every configuration, then train them; a file `done` in a run's folder says that it has ended.

    Args:
        configs: of models with the architecture of the first, with the same lengths of prompts and responses.
        storage: a folder for Ray Train.
    """
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from rl_plugins.launch.ray_train import start_ray, vllm_rollout, worker_environment

    for config in configs:
        preflight(config)
    for config in configs:
        folder = RunFolder(Path(config.run.output_dir) / config.run.name)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")
    environment = {**worker_environment("cpu"), "DS_ACCELERATOR": "cpu"}
    os.environ.update(environment)
    start_ray(configs[0], environment)
    rollout = vllm_rollout(configs[0], "cpu")
    rollout.start()
    TorchTrainer(
        _train_all,
        train_loop_config={"configs": [asdict(config) for config in configs], "rollout": rollout},
        torch_config=TorchConfig(backend="gloo", timeout_s=300),
        scaling_config=ScalingConfig(num_workers=configs[0].placement.num_workers, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="in_turn", storage_path=str(storage)),
    ).fit()
    ray.shutdown()


def _train_all(arguments: dict[str, Any]) -> None:
    """What each worker runs."""
    import torch
    from ray.train.lightning import RayLightningEnvironment

    from rl_plugins.launch.build import fit
    from rl_plugins.launch.ray_train import ray_strategy
    from rl_plugins.rewards.pool import RewardPool

    torch.set_num_threads(1)
    for values in arguments["configs"]:
        config = parse_config(values)
        folder = RunFolder(Path(config.run.output_dir) / config.run.name)
        samples = generates(config)
        rollout = arguments["rollout"] if samples else None
        strategy = ray_strategy(config, rollout)
        functions, deadline_s = config.reward.functions, config.reward.deadline_s
        pool = RewardPool(functions, num_workers=1, deadline_s=deadline_s) if samples else nullcontext()
        with pool as scorer:
            fit(
                config, folder, strategy, scorer, None,
                in_ray=False, redraw_s=60, started=time.time(), accelerator="cpu", devices="auto",
                plugins=[RayLightningEnvironment()],
            )  # fmt: skip
        (folder.path / "done").touch()
