"""A tracking server as a team runs it: `mlflow server`, which tests kill and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from integration_tests.conftest import Recipe, free_port
from rl_plugins.callbacks.best_checkpoints import ranked_bests
from rl_plugins.run_folder import RunFolder


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

    def metrics(self, experiment: str) -> tuple[str, dict[str, dict[int, float]], int]:
        """Status, metrics and number of points of the one run, read from the file: the server need not be there."""
        from mlflow import MlflowClient

        client = MlflowClient(self.store)
        found = client.get_experiment_by_name(experiment)
        runs = [] if found is None else client.search_runs([found.experiment_id])
        if not runs:
            return "", {}, 0
        (run,) = runs
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        values = {name: {m.step: m.value for m in history} for name, history in histories.items()}
        return run.info.status, values, sum(map(len, histories.values()))

    def uploaded(self, experiment: str) -> list[str]:
        """Names of the checkpoints that an experiment has as artifacts, as the server's disk has them."""
        from mlflow import MlflowClient

        found = MlflowClient(self.store).get_experiment_by_name(experiment)
        assert found is not None, f"there is no experiment {experiment}"
        artifacts = self.folder / "artifacts" / found.experiment_id
        return sorted(path.name for path in artifacts.glob("*/artifacts/best_*"))

    def wait_for_metrics(self, run: Recipe, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.metrics(run.name)[1].get("train/loss", {})) < 2:
            assert run.process.poll() is None and time.monotonic() < deadline, f"no metrics arrived:\n{run.tail()}"
            time.sleep(0.1)


def best_of(run: Path, metric: str) -> Path:
    """The best checkpoint in a run's folder."""
    return ranked_bests(RunFolder(run), metric, "max")[0]
