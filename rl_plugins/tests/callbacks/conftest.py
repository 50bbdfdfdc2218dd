"""A tracking store of the session, and runs in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_plugins.callbacks import mlflow_sender
from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.callbacks.mlflow_run import Facts, TrackedRun, open_run
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.mlflow_store import make_store
from rl_plugins.tests.patience import patient


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of an SQLite store."""
    return make_store(tmp_path_factory.mktemp("store") / "mlflow.db")


@pytest.fixture
def quick_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sender try again and look for metrics at once."""
    monkeypatch.setattr(mlflow_sender, "_RETRY_S", 0.02)
    monkeypatch.setattr(mlflow_sender, "_METRICS_EVERY_S", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    return tmp_path.name


@pytest.fixture
def tracking(store: str, folder: RunFolder, experiment: str) -> Callable[..., MLflowTracking]:
    """A logger of the run, as each of its processes makes one."""

    def tracking(facts: Facts | None = None) -> MLflowTracking:
        return MLflowTracking(
            uri=store, experiment=experiment, folder=folder, facts=facts, finish_timeout_s=patient(60)
        )

    return tracking


@pytest.fixture
def run(store: str, folder: RunFolder, experiment: str) -> TrackedRun:
    return open_run(store, experiment, folder, Facts())
