"""Two steps of every algorithm recipe on one Ray cluster, one pair of ZeRO-3 workers and one vLLM engine.

Run as a script by `test_algorithm_recipes.py`: `algorithm_recipes.py WORKPLACE FOLDER NAME...`. The runs follow each
other in the same workers, so that all of them take little longer than one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.shared_workers import train_in_turn
from rl_plugins.launch.command_line import compose_config
from rl_plugins.launch.config import RecipeConfig, parse_config

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


if __name__ == "__main__":
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    train_in_turn([recipe(name, *folders) for name in sys.argv[3:]], folders[1] / "ray")
