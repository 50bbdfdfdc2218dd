"""A tracking server that is killed in mid-run: training goes on, and a server that comes back gets everything."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration_tests.conftest import Recipe, free_port
from rl_plugins.run_folder import read_metrics

STEPS = 60


class Server:
    """`mlflow server` over an SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri, self.store = f"http://127.0.0.1:{self.port}", f"sqlite:///{folder}/server.db"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, timeout_s: float = 120) -> None:
        command = [
            sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.store,
            "--artifacts-destination", str(self.folder / "artifacts"),
            "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
        ]  # fmt: skip
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        deadline = time.monotonic() + timeout_s
        while True:
            assert self.process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the server did not come up"
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.2)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def metrics(self, experiment: str) -> tuple[str, dict[str, dict[int, float]]]:
        """Status and metrics of the one run, read from the file: the server need not be there."""
        from mlflow import MlflowClient

        client = MlflowClient(self.store)
        found = client.get_experiment_by_name(experiment)
        runs = [] if found is None else client.search_runs([found.experiment_id])
        if not runs:
            return "", {}
        (run,) = runs
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        return run.info.status, {name: {m.step: m.value for m in history} for name, history in histories.items()}

    def wait_for_metrics(self, run: Recipe, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.metrics(run.name)[1].get("train/loss", {})) < 2:
            assert run.process.poll() is None and time.monotonic() < deadline, f"no metrics arrived:\n{run.tail()}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("mlflow"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file is there, the run waits in its reward."""
    return tmp_path / "gate"


@pytest.fixture
def start(start_recipe: Callable[..., Recipe], server: Server, gate: Path) -> Callable[[str], Recipe]:
    def start(name: str) -> Recipe:
        return start_recipe(
            "grpo", name, "launcher=local", "rollout.engine=transformers", f"run.steps={STEPS}", "run.eval_every=0",
            "batch.prompts_per_step=2", "batch.samples_per_prompt=2", f"tracking.uri={server.uri}",
            f"tracking.experiment={name}", "reward.deadline_s=120",
            "reward.functions.default._target_=integration_tests.rewards.held",
            f"+reward.functions.default.gate={gate}",
        )  # fmt: skip

    return start


def test_a_server_that_comes_back_gets_everything(start: Callable[[str], Recipe], server: Server, gate: Path) -> None:
    run = start("back")
    run.wait_for_step(2)
    gate.touch()
    server.wait_for_metrics(run)
    server.kill()
    gate.unlink()
    run.wait_for_step(len(run.metrics()) + 3)
    gate.touch()
    assert run.metrics()[-1]["step"] < STEPS, "the run ended before the server could come back"
    server.start()
    gate.unlink()
    assert run.wait(120) == 0, run.tail()
    status, metrics = server.metrics("back")
    assert status == "FINISHED"
    assert metrics == read_metrics(run.run / "metrics.jsonl")
    (away,) = said(run)
    assert f"MLflow at {server.uri} is away, metrics wait for it" in away


def test_training_ends_well_without_the_server(start: Callable[[str], Recipe], server: Server, gate: Path) -> None:
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


def said(run: Recipe) -> list[str]:
    """The lines in which the run speaks of its tracking."""
    return [line for line in run.log.read_text().splitlines() if "MLflow" in line or "urllib3" in line]
