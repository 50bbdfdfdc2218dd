"""Fixtures: an MLflow store of the session, and runs in the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.patience import patient
from rl_plugins.tracking import sender
from rl_plugins.tracking.loggers import MLflowTracking
from rl_plugins.tracking.run import RunDescription, TrackedRun, open_run
from rl_plugins.tracking.store import import_mlflow


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, sqlite_without_sync: None) -> str:
    """URI of an SQLite store with all tables."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    import_mlflow()
    from mlflow import MlflowClient

    MlflowClient(uri).search_experiments()
    return uri


@pytest.fixture
def quick_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sender retry and send metrics almost without waiting."""
    monkeypatch.setattr(sender, "_RETRY_S", 0.02)
    monkeypatch.setattr(sender, "_METRICS_INTERVAL_S", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    return tmp_path.name


@pytest.fixture
def tracking(store: str, folder: RunFolder, experiment: str) -> Callable[..., MLflowTracking]:
    """Create a logger of the run, as each process of the run does."""

    def tracking(description: RunDescription | None = None) -> MLflowTracking:
        return MLflowTracking(
            uri=store, experiment=experiment, folder=folder, description=description, finish_timeout_s=patient(60)
        )

    return tracking


@pytest.fixture
def run(store: str, folder: RunFolder, experiment: str) -> TrackedRun:
    return open_run(store, experiment, folder, RunDescription())
