"""A tracking server that is killed in mid-run: training goes on, and a server that comes back gets everything."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.conftest import Recipe
from integration_tests.mlflow_server import Server, best_of
from rl_plugins.run_folder import read_metrics

pytestmark = pytest.mark.extended

STEPS = 60


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file is there, the run waits in its reward."""
    return tmp_path / "gate"


@pytest.fixture
def start(start_recipe: Callable[..., Recipe], server: Server, gate: Path) -> Callable[..., Recipe]:
    def start(name: str, *overrides: str) -> Recipe:
        return start_recipe(
            "grpo", name, "launcher=local", "rollout.engine=transformers", f"run.steps={STEPS}", "run.eval_every=0",
            "batch.prompts_per_step=2", "batch.samples_per_prompt=2", f"tracking.uri={server.uri}",
            f"tracking.experiment={name}", "reward.deadline_s=120",
            "reward.functions.default._target_=integration_tests.rewards.held",
            f"+reward.functions.default.gate={gate}", "run.checkpoint_every=4", "run.keep_best=2",
            "run.best_metric=train/loss", "tracking.upload_best=1", *overrides,
        )  # fmt: skip

    return start


def test_a_server_that_comes_back_gets_everything(start: Callable[..., Recipe], server: Server, gate: Path) -> None:
    run = start("back")
    run.wait_for_step(2)
    gate.touch()
    server.wait_for_metrics(run)
    server.kill()
    gate.unlink()
    run.wait_for_step(len(run.metrics()) + 3)
    gate.touch()
    assert run.metrics()[-1]["step"] < STEPS, "the run ended before the server could come back"
    # Points are sent every few seconds.
    deadline = time.monotonic() + 60
    while not said(run):
        assert time.monotonic() < deadline, run.tail()
        time.sleep(0.2)
    server.start()
    gate.unlink()
    assert run.wait(120) == 0, run.tail()
    status, metrics, points = server.metrics("back")
    assert status == "FINISHED" and server.uploaded(run.name) == [best_of(run.run, "train/loss").name]
    assert metrics == read_metrics(run.run / "metrics.jsonl") and points == sum(map(len, metrics.values()))
    (away,) = said(run)
    assert f"MLflow at {server.uri} is away, metrics wait for it" in away


def test_training_ends_well_without_the_server(start: Callable[..., Recipe], server: Server, gate: Path) -> None:
    run = start("gone")
    run.wait_for_step(2)
    gate.touch()
    server.wait_for_metrics(run)
    server.kill()
    gate.unlink()
    assert run.wait(180) == 0, run.tail()
    assert list(read_metrics(run.run / "metrics.jsonl")["train/loss"]) == list(range(1, STEPS + 1))
    assert (run.run / "policy" / "model.safetensors").is_file()
    away, lost = (line[line.index("MLflow at ") :] for line in said(run))
    assert away.startswith(f"MLflow at {server.uri} is away, metrics wait for it")
    assert lost.startswith(f"MLflow at {server.uri} did not take the last") and "metrics.jsonl" in lost
    assert len(server.metrics("gone")[1]["train/loss"]) < STEPS
    server.start()
    sync = subprocess.run(
        [sys.executable, "-m", "rl_plugins", "sync", str(run.run)], capture_output=True, text=True, timeout=120
    )
    assert sync.returncode == 0 and f"{server.uri} has all of {run.run}" in sync.stdout, sync.stdout + sync.stderr
    status, metrics, points = server.metrics("gone")
    assert status == "FINISHED" and server.uploaded(run.name) == [best_of(run.run, "train/loss").name]
    assert metrics == read_metrics(run.run / "metrics.jsonl") and points == sum(map(len, metrics.values()))


def test_a_run_killed_in_an_outage_goes_on_without_a_gap_or_a_repeated_point(
    start: Callable[..., Recipe], server: Server, gate: Path
) -> None:
    run = start("killed")
    run.wait_for_step(5)
    gate.touch()
    server.wait_for_metrics(run)
    server.kill()
    gate.unlink()
    run.wait_for_step(len(run.metrics()) + 4)
    run.kill()
    server.start()
    resumed = start("killed", "run.resume=true")
    assert resumed.wait(180) == 0, resumed.tail()
    status, metrics, points = server.metrics("killed")
    assert status == "FINISHED" and list(metrics["train/loss"]) == list(range(1, STEPS + 1))
    assert points == sum(map(len, metrics.values())), "a point came twice"
    assert server.uploaded("killed") == [best_of(run.run, "train/loss").name]
    assert metrics.keys() == read_metrics(run.run / "metrics.jsonl").keys()


def said(run: Recipe) -> list[str]:
    """The lines in which the run speaks of its tracking."""
    return [line for line in run.log.read_text().splitlines() if "MLflow" in line or "urllib3" in line]
