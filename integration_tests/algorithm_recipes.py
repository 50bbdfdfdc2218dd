"""Two steps of every algorithm recipe on one Ray cluster, one pair of ZeRO-3 workers and one vLLM engine.

Run as a script by `test_algorithm_recipes.py`: `algorithm_recipes.py WORKPLACE FOLDER NAME...`. The runs follow each
other in the same workers, so that all of them take little longer than one.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_plugins.launch.command_line import compose_config
from rl_plugins.launch.config import RecipeConfig, parse_config
from rl_plugins.launch.preflight import preflight

# What a recipe cannot run without.
EXTRAS = {
    "gdpo": ["reward.functions.default={_target_: integration_tests.rewards.short_and_even}"],
    "on_policy_distillation": ["teacher.path={workplace}/other"],
    "forward_kl_distillation": ["teacher.path={workplace}/other"],
    "reinforce_plus_plus": ["algorithm.kl.coefficient=0.01", "algorithm.kl.placement=reward"],
}


def recipe(name: str, workplace: Path, folder: Path) -> RecipeConfig:
    """The configuration of two steps of an algorithm."""
    stage = "prime" if name == "prime" else "policy_optimization"
    overrides = [
        f"algorithm={name}", f"stage={stage}", f"run.name={name}", f"run.output_dir={folder}", "run.steps=2",
        "run.eval_every=0", "run.eval_before=false", "run.export=true", "tracking.enabled=false",
        f"model.path={workplace}/tiny", f"data.train_files=[{workplace}/data/train.parquet]",
        "data.max_prompt_tokens=28", "sampling.max_tokens=8", "batch.prompts_per_step=8",
        "batch.samples_per_prompt=4", "batch.updates_per_step=2", "optimizer.lr=1e-3", "placement.device=cpu",
        # Rewards that differ from sample to sample, so that dynamic sampling finds groups to train on.
        "reward.functions.default={_target_: integration_tests.rewards.shortness}",
        *(extra.format(workplace=workplace) for extra in EXTRAS.get(name, [])),
    ]  # fmt: skip
    return parse_config(compose_config("grpo", overrides))


def train_all(arguments: dict[str, Any]) -> None:
    """What each worker runs."""
    import torch
    from ray.train.lightning import RayLightningEnvironment

    from rl_plugins.launch.build import fit
    from rl_plugins.rewards.pool import RewardPool
    from rl_plugins.run_folder import RunFolder
    from rl_plugins.strategies.ray_zero import RayZeroStrategy

    torch.set_num_threads(1)
    for values in arguments["configs"]:
        config = parse_config(values)
        folder = RunFolder(Path(config.run.output_dir) / config.run.name)
        folder.path.mkdir(parents=True, exist_ok=True)
        strategy = RayZeroStrategy(stage=3, rollout=arguments["rollout"], timeout_s=120)
        with RewardPool(config.reward.functions, num_workers=1, deadline_s=30) as scorer:
            fit(
                config, folder, strategy, scorer, None,
                in_ray=False, redraw_s=60, accelerator="cpu", devices="auto", plugins=[RayLightningEnvironment()],
            )  # fmt: skip
        (folder.path / "done").touch()


def main(workplace: Path, folder: Path, names: list[str]) -> None:
    """Check every configuration, then train them one after the other."""
    import os

    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from rl_plugins.launch.ray_train import start_ray, vllm_rollout, worker_environment

    configs = [recipe(name, workplace, folder) for name in names]
    for config in configs:
        preflight(config)
    environment = {**worker_environment("cpu"), "DS_ACCELERATOR": "cpu"}
    os.environ.update(environment)
    start_ray(configs[0], environment)
    rollout = vllm_rollout(configs[0], "cpu")
    rollout.start()
    TorchTrainer(
        train_all,
        train_loop_config={"configs": [asdict(config) for config in configs], "rollout": rollout},
        torch_config=TorchConfig(backend="gloo", timeout_s=120),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(name="all", storage_path=str(folder / "ray")),
    ).fit()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
