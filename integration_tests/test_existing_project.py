"""A team's Lightning project without and with RL: both examples train, and differ in few lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file

from integration_tests.projects import added_lines, logged
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.patience import patient

ROOT = Path(__file__).parents[1]
BEFORE, AFTER = ROOT / "examples" / "existing_project", ROOT / "examples" / "existing_project_rl"
MOST_ADDED_LINES = {"train.py": 13, "cli.py": 12}
"""For each script: the largest number of lines that RL adds to the script and to the files of the script."""
OF_CLI = {"cli.py", "cli.yaml", "reward.py"}
LOG = Path("logs", "version_0", "metrics.csv")


def run_project(project: Path, folder: Path, name: str, **options: object) -> Path:
    """Run the project's script as the team does; return the folder with the results."""
    output = folder / name
    files = {"train_file": folder / "train.parquet", "val_file": folder / "test.parquet", "output": output}
    command = [sys.executable, str(project / "train.py")]
    command += [f"{key}={value}" for key, value in {**files, **options}.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_ADDRESS": "local"}
    # The project does not set the accelerator of DeepSpeed to CPU.
    environment.pop("DS_ACCELERATOR", None)
    outcome = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patient(420))
    assert outcome.returncode == 0, (outcome.stdout + outcome.stderr)[-8000:]
    return output


def largest_change(before: Path, after: Path) -> float:
    """Return the largest change of a weight between two model folders with the same tensors."""
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert old.keys() == new.keys()
    return max(float((new[name] - old[name]).abs().max()) for name in old)


def assert_kept(metrics: Mapping[str, list[float]], output: Path, *, steps: int, lr: float) -> None:
    """Check the project's callback, its schedule for both parameter groups, and its checkpoints."""
    assert len(metrics["seconds_per_step"]) == steps
    assert min(metrics["seconds_per_step"]) > 0
    for group in ("matrices", "vectors"):
        rates = metrics[f"lr-AdamW/{group}"]
        assert rates[:3] == pytest.approx([0.0, lr / 2, lr])
        assert len(rates) == steps and rates[3:] == sorted(rates[3:], reverse=True) and rates[-1] < lr
    assert list((output / "checkpoints").glob(f"epoch=*-step={steps}.ckpt"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("project")
    write_splits(addition_rows(below=10, num_train=80, num_test=16, seed=0), path)
    save_tiny_policy(path / "tiny")
    return path


@pytest.fixture(scope="module")
def fine_tuned(folder: Path) -> Path:
    options = {"steps": 100, "val_every": 50, "lr": 3e-3}
    return run_project(BEFORE, folder, "sft", model=folder / "tiny", **options)


def test_project_with_rl_adds_few_lines() -> None:
    names, with_rl = ({path.name for path in folder.iterdir() if path.is_file()} for folder in (BEFORE, AFTER))
    assert with_rl - names == {"reward.py"} and names < with_rl
    added = {name: added_lines(BEFORE / name, AFTER / name) for name in with_rl - {"README.md"}}
    assert set(added) == {"model.py", "data.py", "train.py", "config.yaml", *OF_CLI}
    counts = {"train.py": 0, "cli.py": 0}
    for name, lines in added.items():
        counts["cli.py" if name in OF_CLI else "train.py"] += len(lines)
    assert all(0 < counts[script] <= most for script, most in MOST_ADDED_LINES.items()), counts
    assert not any("rl_plugins" in (BEFORE / name).read_text() for name in names - {"README.md"})


@pytest.mark.extended
def test_project_without_rl_trains(folder: Path, fine_tuned: Path) -> None:
    metrics = logged(fine_tuned / LOG)
    assert_kept(metrics, fine_tuned, steps=100, lr=3e-3)
    assert metrics["train_loss"][-1] < metrics["train_loss"][0] / 2
    assert len(metrics["val_loss"]) == 2
    assert largest_change(folder / "tiny", fine_tuned / "model") > 1e-3


@pytest.mark.extended
def test_project_with_rl_trains(folder: Path, fine_tuned: Path) -> None:
    steps, lr = 6, 1e-3
    options = {"steps": steps, "val_every": 3, "lr": lr}
    output = run_project(AFTER, folder, "rl", model=fine_tuned / "model", **options)
    metrics = logged(output / LOG)
    assert_kept(metrics, output, steps=steps, lr=lr)
    assert len(metrics["train/reward"]) == steps
    assert min(metrics["train/reward"]) > 0 and max(metrics["train/reward"]) < 1
    assert len(metrics["val/reward"]) == 3  # Lightning's check before training, and two validations
    assert metrics["train/reward_raised"] == [0.0] * steps
    assert min(metrics["train/gradient_norm"]) > 0
    # The engine sampled from the trained weights: the weights arrived after every step.
    assert max(metrics["train/rollout_gap_max"]) < 1e-3
    assert largest_change(fine_tuned / "model", output / "model") > lr / 10
