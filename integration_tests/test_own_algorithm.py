"""The example of a user's own algorithm trains, named by `_target_` and by entry point."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.command_server import run_command
from rl_plugins.run_folder import read_metrics
from rl_plugins.tests.patience import patient

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_algorithm"


def train(workplace: Path, folder: Path, python_path: Path, *overrides: str) -> dict[str, dict[int, float]]:
    """The metrics of two steps in one process."""
    command = [
        sys.executable, "-m", "rl_plugins.recipes.grpo", *overrides, f"model.path={workplace}/tiny",
        f"data.train_files=[{workplace}/data/train.parquet]", "launcher=local", "rollout.engine=transformers",
        "data.max_prompt_tokens=28", "sampling.max_tokens=8", "batch.prompts_per_step=4", "batch.updates_per_step=2",
        "run.steps=2", "run.eval_every=0", "run.export=false", "run.name=own", f"run.output_dir={folder}",
        "tracking.enabled=false", "optimizer.lr=1e-2",
        "reward.functions.default={_target_: integration_tests.rewards.shortness}",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": f"{python_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    run_command(command, cwd=folder, env=environment, check=True)
    return read_metrics(folder / "own" / "metrics.jsonl")


def assert_trained(series: dict[str, dict[int, float]]) -> None:
    # The second of two updates has a ratio other than 1, and therefore a penalty.
    assert all(value > 0 for value in series["train/penalty"].values())
    assert all(map(math.isfinite, series["train/loss"].values())) and min(series["train/gradient_norm"].values()) > 0


def test_own_algorithm_by_target_trains(workplace: Path, tmp_path: Path) -> None:
    overrides = ["--config-dir", str(EXAMPLE / "conf"), "algorithm=median_penalty"]
    assert_trained(train(workplace, tmp_path, EXAMPLE, *overrides))


@pytest.mark.extended
def test_own_algorithm_by_entry_point_trains(workplace: Path, tmp_path: Path) -> None:
    # A copy, because the build writes into the source folder.
    source, site = shutil.copytree(EXAMPLE, tmp_path / "source"), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=patient(240))
    options = ["algorithm.advantage=median_baseline", "algorithm.policy_loss=penalized_ratio"]
    assert_trained(train(workplace, tmp_path, site, "algorithm=rloo", *options))
