"""Several runs in order on one Ray cluster, with one worker group for each number of workers and with the same engines.

Each run is a recipe without its slow start, for comparisons of many short runs. Runs do not restart after a failure.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rl_plugins.config.recipe import RecipeConfig, parse_config
from rl_plugins.launch.command_line import check_all_options
from rl_plugins.launch.preflight import preflight
from rl_plugins.run_folder import RunFolder

if TYPE_CHECKING:
    from rl_plugins.rollout.engine import RolloutEngine


def train_in_turn(configs: Sequence[RecipeConfig], storage: Path) -> None:
    """Check all configurations, then train each. A file `done` in a run's folder marks a finished run.

    A run in the folder of a run before goes on from the newest checkpoint there.

    Args:
        configs: configurations with one model architecture. The engines take the longest prompts and responses.
        storage: folder for Ray Train.
    """
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from rl_plugins.launch.ray_train import start_ray, worker_environment
    from rl_plugins.launch.rollout_engines import vllm_rollout

    for config in configs:
        config.placement.device = "cpu"
        check_all_options(config)
        preflight(config)
    for config in configs:
        folder = RunFolder(Path(config.run.output_dir) / config.run.name)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")
    environment = {**worker_environment("cpu"), "DS_ACCELERATOR": "cpu"}
    os.environ.update(environment)
    start_ray(environment)
    rollout = None
    if sampling := [config for config in configs if with_vllm(config)]:
        rollout = vllm_rollout(max(sampling, key=lambda one: one.data.max_prompt_tokens + one.sampling.max_tokens))
        rollout.start()
    for num_workers in dict.fromkeys(config.placement.num_workers for config in configs):
        mine = [asdict(config) for config in configs if config.placement.num_workers == num_workers]
        TorchTrainer(
            _train_all,
            train_loop_config={"configs": mine, "rollout": rollout},
            torch_config=TorchConfig(backend="gloo", timeout_s=300),
            scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(name=f"in_turn_{num_workers}", storage_path=str(storage)),
        ).fit()
    ray.shutdown()


def with_vllm(config: RecipeConfig) -> bool:
    """Return True if the run samples with the shared rollout engines."""
    return config.generates and config.rollout.engine == "vllm"


def _train_all(arguments: dict[str, Any]) -> None:
    """Train all runs in one worker."""
    import ray.train
    import torch
    from ray.train.lightning import RayLightningEnvironment

    from rl_plugins.intact_checkpoint import newest_intact
    from rl_plugins.launch.ray_train import ray_strategy
    from rl_plugins.launch.scorer import scorer_of
    from rl_plugins.launch.training import TrainingRun
    from rl_plugins.rollout.transformers_engine import TransformersRollout

    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    for values in arguments["configs"]:
        config = parse_config(values)
        folder = RunFolder(Path(config.run.output_dir) / config.run.name)
        rollout: RolloutEngine | None = None
        if with_vllm(config):
            rollout = arguments["rollout"]
        elif config.generates:
            rollout = TransformersRollout(config.model.path, check_updates=config.rollout.check_updates)
        strategy = ray_strategy(config, rollout)
        scorer = scorer_of(config)
        with nullcontext() if scorer is None else closing(scorer):
            TrainingRun(
                config=config,
                folder=folder,
                strategy=strategy,
                scorer=scorer,
                checkpoint=newest_intact(folder),
                in_ray=False,
                redraw_s=60,
                started=time.time(),
                trainer_options={"accelerator": "cpu", "devices": "auto", "plugins": [RayLightningEnvironment()]},
            ).call_recipe()
        if rank == 0:
            (folder.path / "done").touch()
