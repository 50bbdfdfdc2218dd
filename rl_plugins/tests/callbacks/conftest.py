"""A tracking store of the session, and runs in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_plugins.callbacks import mlflow_sender
from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.callbacks.mlflow_import import import_mlflow
from rl_plugins.callbacks.mlflow_run import Facts, TrackedRun, open_run
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.patience import patient


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, sqlite_without_sync: None) -> str:
    """URI of an SQLite store that has all tables."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    import_mlflow()
    from mlflow import MlflowClient

    MlflowClient(uri).search_experiments()
    return uri


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
