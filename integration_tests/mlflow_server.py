"""A tracking server as a team runs it: `mlflow server`. Tests kill the server, start it again, and cut it off."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from integration_tests.conftest import Recipe
from integration_tests.relay import Relay
from rl_plugins.callbacks.best_checkpoints import ranked_bests
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tracking.unsent_metrics import FIRST_CHARTS


class Server:
    """`mlflow server` with an SQLite file. Clients connect through a relay, at the same address for all starts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._relay = folder, Relay()
        self.uri, self.store = f"http://127.0.0.1:{self._relay.port}", f"sqlite:///{folder}/server.db"
        self._log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def start(self) -> None:
        """Start the server if it does not run, and let clients connect."""
        if self._process is None:
            command = [
                sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.store,
                "--artifacts-destination", str(self.folder / "artifacts"),
                # The system chooses a free port.
                "--host", "127.0.0.1", "--port", "0", "--workers", "1",
            ]  # fmt: skip
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                )
            wait_until(self._listens, "a tracking server that listens", 240, self._log.read_text)
        self._relay.open(self._port)

    def cut_off(self) -> None:
        """Break the connections of clients and refuse new connections until `start`. The server does not notice."""
        self._relay.refuse()

    def kill(self) -> None:
        """Kill the server with SIGKILL."""
        self._relay.refuse()
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(patient(30))
            self._process = None

    def close(self) -> None:
        """Kill the server and release the address."""
        self.kill()
        self._relay.close()

    def metrics(self, experiment: str) -> tuple[str, dict[str, dict[int, float]], int]:
        """Status, metrics and number of points of the one run, read from the file, also without a server.

        The second names of the first charts are left out.
        """
        from mlflow import MlflowClient

        client = MlflowClient(self.store)
        found = client.get_experiment_by_name(experiment)
        runs = [] if found is None else client.search_runs([found.experiment_id])
        if not runs:
            return "", {}, 0
        (run,) = runs
        names = run.data.metrics.keys() - FIRST_CHARTS.values()
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in names}
        values = {name: {m.step: m.value for m in history} for name, history in histories.items()}
        return run.info.status, values, sum(map(len, histories.values()))

    def uploaded(self, experiment: str) -> list[str]:
        """Return the names of the checkpoints of an experiment, read from the server's artifacts on disk."""
        from mlflow import MlflowClient

        found = MlflowClient(self.store).get_experiment_by_name(experiment)
        assert found is not None, f"there is no experiment {experiment}"
        artifacts = self.folder / "artifacts" / found.experiment_id
        return sorted(path.name for path in artifacts.glob("*/artifacts/best_*"))

    def wait_for_metrics(self, run: Recipe) -> None:
        """Wait until the server has the loss of two steps of a run."""
        run.wait_until(lambda: len(self.metrics(run.name)[1].get("train/loss", {})) >= 2, "metrics on the server")

    def _listens(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        root = psutil.Process(self._process.pid)
        for process in (root, *root.children(recursive=True)):
            for connection in process.net_connections("tcp4"):
                if connection.status == psutil.CONN_LISTEN:
                    self._port = connection.laddr.port
                    return True
        return False


def best_of(run: Path, metric: str) -> Path:
    """The best checkpoint in a run's folder."""
    return ranked_bests(RunFolder(run), metric, "max")[0]
