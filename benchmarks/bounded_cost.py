"""Safe RLHF keeps the mean cost below its threshold where PPO, with the same reward, pays for costly answers.

`python -m benchmarks.bounded_cost [--steps 50] [--folder DIR]` trains a tiny policy twice in this process, without Ray
and vLLM. A letter pays 1 and costs 1, and a digit pays 0.6 and costs nothing. So the reward alone prefers letters, and
a mean cost of at most 0.3 allows a mean reward of 0.72. The program exits with 1 if the bound has not been kept.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.quickstart import write_sums
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import read_metrics

THRESHOLD = 0.3
MAX_TOKENS = 4
CRITICS = ("critic", "cost_critic")
RUNS: dict[str, Sequence[str]] = {
    "ppo": (),
    "safe_rlhf": (
        "algorithm.constraint.cost=cost", f"algorithm.constraint.threshold={THRESHOLD}",
        "algorithm.constraint.lambda_init=0.2", "algorithm.constraint.lambda_lr=1", "algorithm.constraint.window=2",
        "algorithm.kl.coefficient=0",
    ),
}  # fmt: skip
"""Options of each recipe beside the common options."""


def pay(solution_str: str) -> dict[str, float]:
    """Return the shares of letters and digits in a full response, as reward and cost."""
    letters = sum(character.isascii() and character.isalpha() for character in solution_str) / MAX_TOKENS
    digits = sum(character.isascii() and character.isdigit() for character in solution_str) / MAX_TOKENS
    return {"score": letters + 0.6 * digits, "cost": letters}


def train(recipe: str, folder: Path, steps: int) -> Mapping[str, Mapping[int, float]]:
    """Train with a recipe, and return the metrics by name and step."""
    options = [
        f"run.name={recipe}", f"run.output_dir={folder}", f"run.steps={steps}", "run.eval_every=0", "run.export=false",
        "run.eval_before=false", "run.checkpoint_every=100000", "tracking.enabled=false", f"model.path={folder}/tiny",
        f"data.train_files=[{folder}/data/train.parquet]", "data.max_prompt_tokens=28", "launcher=local",
        "rollout.engine=transformers", "placement.device=cpu", "reward.num_workers=0",
        "reward.functions.default={_target_: benchmarks.bounded_cost.pay}", f"sampling.max_tokens={MAX_TOKENS}",
        "batch.prompts_per_step=32", "batch.samples_per_prompt=4", "batch.updates_per_step=2", "optimizer.lr=1e-3",
        *(f"{critic}.optimizer.lr=1e-3" for critic in CRITICS), *(f"{critic}.warmup_steps=3" for critic in CRITICS),
        *RUNS[recipe],
    ]  # fmt: skip
    run_recipe(parse_config(compose_config(recipe, options)))
    return read_metrics(folder / recipe / "metrics.jsonl")


def mean_of_last(series: Mapping[int, float], steps: int) -> float:
    """Return the mean of the last values of a series."""
    return fmean(list(series.values())[-steps:])


def main() -> int:
    """Train, print reward, cost and lambda of the last steps, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        write_sums(folder / "data", seed=0)
        save_tiny_policy(folder / "tiny")
        metrics = {recipe: train(recipe, folder, arguments.steps) for recipe in RUNS}
    last = max(1, arguments.steps // 8)
    costs = {recipe: mean_of_last(series["train/rewards/cost"], last) for recipe, series in metrics.items()}
    for recipe, series in metrics.items():
        reward = mean_of_last(series["train/reward"], last)
        print(f"{recipe:10} reward {reward:.3f}  cost {costs[recipe]:.3f}  (mean of the last {last} steps)")
    lambdas = list(metrics["safe_rlhf"]["train/lambda"].values())
    print(
        f"threshold {THRESHOLD}; lambda {lambdas[0]:.2f} at first, {max(lambdas):.2f} at most, {lambdas[-1]:.2f} last"
    )
    binds = costs["ppo"] > 2 * THRESHOLD and max(lambdas) > lambdas[0]
    return 0 if binds and costs["safe_rlhf"] <= 1.1 * THRESHOLD else 1


if __name__ == "__main__":
    raise SystemExit(main())
