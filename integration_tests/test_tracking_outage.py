"""A tracking server is lost in mid-run: training goes on, and the returning server gets everything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from integration_tests.command_server import run_command
from integration_tests.conftest import Recipe
from integration_tests.mlflow_server import Server, best_of
from integration_tests.pace import Pace
from rl_plugins.run_folder import read_metrics

pytestmark = pytest.mark.extended

STEPS = 12


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path / "pace", samples=4)


@pytest.fixture
def start(start_recipe: Callable[..., Recipe], server: Server, pace: Pace) -> Callable[..., Recipe]:
    def start(name: str, *overrides: str) -> Recipe:
        return start_recipe(
            "grpo", name, "launcher=local", "rollout.engine=transformers", f"run.steps={STEPS}", "run.eval_every=0",
            "batch.prompts_per_step=2", "batch.samples_per_prompt=2", f"tracking.uri={server.uri}",
            f"tracking.experiment={name}", "run.checkpoint_every=4", "run.keep_best=2",
            "run.best_metric=train/loss", "run.best_mode=min", "tracking.upload_best=1", *pace.overrides, *overrides,
        )  # fmt: skip

    return start


def test_server_that_comes_back_gets_all_metrics(start: Callable[..., Recipe], server: Server, pace: Pace) -> None:
    pace.allow(2)
    run = start("back")
    pace.wait(run)
    server.wait_for_metrics(run)
    server.cut_off()
    pace.allow(5)
    pace.wait(run)
    run.wait_until(lambda: said(run), "a word about the server that is away")
    server.start()
    pace.allow_all()
    assert run.wait() == 0, run.tail()
    assert_server_has_all_of(run, server)
    (away,) = said(run)
    assert f"MLflow at {server.uri} is away, metrics wait for it" in away


def test_run_ends_without_the_server_and_sync_sends_the_rest(
    start: Callable[..., Recipe], server: Server, pace: Pace
) -> None:
    pace.allow(2)
    run = start("gone")
    pace.wait(run)
    server.wait_for_metrics(run)
    server.cut_off()
    pace.allow_all()
    assert run.wait() == 0, run.tail()
    assert list(read_metrics(run.run / "metrics.jsonl")["train/loss"]) == list(range(1, STEPS + 1))
    assert (run.run / "policy" / "model.safetensors").is_file()
    away, lost = (line[line.index("MLflow at ") :] for line in said(run))
    assert away.startswith(f"MLflow at {server.uri} is away, metrics wait for it")
    assert lost.startswith(f"MLflow at {server.uri} did not take the last") and "metrics.jsonl" in lost
    assert len(server.metrics("gone")[1]["train/loss"]) < STEPS
    server.start()
    sync = run_command([sys.executable, "-m", "rl_plugins", "sync", str(run.run)], cwd=run.folder, check=True)
    assert f"{server.uri} has all of {run.run}" in sync.stdout, sync.stdout + sync.stderr
    assert_server_has_all_of(run, server)


def test_resumed_run_sends_each_point_once_after_server_and_run_were_killed(
    start: Callable[..., Recipe], server: Server, pace: Pace
) -> None:
    pace.allow(5)
    run = start("killed")
    pace.wait(run)
    server.wait_for_metrics(run)
    server.kill()
    pace.allow(9)
    pace.wait(run)
    run.kill()
    server.start()
    pace.allow_all()
    resumed = start("killed", "run.resume=true")
    assert resumed.wait() == 0, resumed.tail()
    status, metrics, points = server.metrics("killed")
    assert status == "FINISHED" and list(metrics["train/loss"]) == list(range(1, STEPS + 1))
    assert points == sum(map(len, metrics.values())), "a point came twice"
    assert server.uploaded("killed") == [best_of(run.run, "train/loss").name]
    assert metrics.keys() == read_metrics(run.run / "metrics.jsonl").keys()


def assert_server_has_all_of(run: Recipe, server: Server) -> None:
    status, metrics, points = server.metrics(run.name)
    assert status == "FINISHED" and server.uploaded(run.name) == [best_of(run.run, "train/loss").name]
    assert metrics == read_metrics(run.run / "metrics.jsonl") and points == sum(map(len, metrics.values()))


def said(run: Recipe) -> list[str]:
    """Return the lines of the run's output about tracking."""
    return [line for line in run.log.read_text().splitlines() if "MLflow" in line or "urllib3" in line]
