"""Every algorithm recipe takes two steps over ZeRO-3 workers and vLLM: the weights move, and the numbers are finite."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from integration_tests import algorithm_recipes
from rl_plugins.callbacks.metrics_file import read_metrics
from rl_plugins.launch.hydra_errors import CONFIG_FOLDER
from rl_plugins.models.tiny import save_tiny_policy

NAMES = sorted(path.stem for path in (CONFIG_FOLDER / "algorithm").glob("*.yaml"))
# What only some of them measure.
ALSO = {
    "ppo": {"train/critic/loss", "train/critic/lr", "train/critic/explained_variance", "time/update_critic"},
    "dapo": {"time/rollout", "train/uniform_groups"},
    "reinforce_plus_plus": {"train/kl", "time/ref_log_probs", "time/old_log_probs"},
    "on_policy_distillation": {"time/teacher_log_probs"},
    "kl_cov": {"train/selected_fraction"},
}


@pytest.fixture(scope="module")
def folder(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    if not (workplace / "other").is_dir():
        save_tiny_policy(workplace / "other", seed=1)
    log = folder / "log.txt"
    with log.open("w") as output:
        command = [sys.executable, algorithm_recipes.__file__, str(workplace), str(folder), *NAMES]
        result = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=580, env=os.environ)
    assert result.returncode == 0, log.read_text()[-6000:]
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name: str, folder: Path, workplace: Path) -> None:
    assert (folder / name / "done").is_file()
    series = read_metrics(folder / name / "metrics.jsonl")
    usual = {"train/reward", "train/loss", "train/entropy", "train/gradient_norm", "train/lr", "train/rollout_gap_max"}
    for metric in usual | ALSO.get(name, set()):
        assert list(series[metric]) == [1, 2], metric
        # A critic that starts at 0 explains nothing of returns that are all alike.
        assert all(map(math.isfinite, series[metric].values())) or metric.endswith("explained_variance"), metric
    assert max(series["train/rollout_gap_max"].values()) < 1e-3
    before, after = (load_file(path / "model.safetensors") for path in (workplace / "tiny", folder / name / "policy"))
    moved = [not torch.equal(before[key], after[key]) for key in before if key in after]
    assert moved and any(moved)
