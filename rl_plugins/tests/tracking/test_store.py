"""An MLflow store: `import_mlflow` in threads gives complete modules; `open_client` makes complete tables."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.patience import patient
from rl_plugins.tracking.store import OTHER_STORES, check_store, import_mlflow, long_requests, open_client

AT_ONCE = """
import sys, threading
from rl_plugins.tracking.store import import_mlflow

start, failures = threading.Barrier(3), []

def use(names):
    start.wait()
    try:
        import_mlflow()
        for name in names:
            __import__(name)
    except BaseException as error:
        failures.append(error)

names = (["mlflow.exceptions"], ["mlflow.system_metrics.metrics.cpu_monitor"], ["mlflow.tracking", "mlflow.entities"])
threads = [threading.Thread(target=use, args=(of,)) for of in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(repr(failures) if failures else 0)
"""


def test_import_mlflow_by_three_threads_at_once() -> None:
    # In a process without an import of MLflow. Without `import_mlflow` the threads' imports fail every time.
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=patient(120))
    assert done.returncode == 0, done.stderr


def test_open_client_removes_the_partial_file_of_a_killed_process(tmp_path: Path, sqlite_without_sync: None) -> None:
    import_mlflow()
    partial = tmp_path / "mlflow.db.partial"
    with closing(sqlite3.connect(partial)) as connection:
        # A migration copies a table through a table of this name, and cannot make a second one.
        connection.execute("CREATE TABLE _alembic_tmp_metrics (run_uuid TEXT)")
    journal = tmp_path / "mlflow.db.partial-journal"
    journal.write_bytes(b"pages of the killed process")

    client = open_client(f"sqlite:///{tmp_path}/mlflow.db")

    assert [experiment.name for experiment in client.search_experiments()] == ["Default"]
    assert not partial.exists() and not journal.exists()


@for_each(
    ("uri", "fault"),
    [
        ("foo://x", "MLflow opens no such store"),
        ("htp://mlflow:5000", "MLflow opens no such store"),
        ("mlflow:5000", "MLflow opens no such store"),
        ("databricks-uc", "MLflow opens no such store"),
        ("mysql", "MLflow opens no such store"),
        ("sqlite:mlflow.db", "MLflow opens no such store"),
        ("sqlite://mlflow.db", "MLflow opens no such store"),
        ("./mlruns", "MLflow opens no such store"),
        ("file:///tmp/mlruns", "MLflow opens no such store"),
        ("http://[mlflow:5000", "no address (Invalid IPv6 URL)"),
        ("sqlite:///", ". is a folder"),
        ("sqlite:////tmp", "/tmp is a folder"),
    ],
)
def test_check_store_refuses_a_store_that_mlflow_cannot_open(
    uri: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(ConfigError) as raised:
        check_store(uri)
    said = str(raised.value)
    assert said.startswith(f"MLflow store {uri}: {fault}: write http://HOST:PORT"), said


@for_each("name", ["mlflow.db", "mlflow.db.lock"])
def test_check_store_names_a_file_that_this_user_cannot_write(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).touch()
    # Root may write each file.
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != name)
    with pytest.raises(ConfigError, match=f"{name} of another user cannot be written: use a server"):
        check_store(f"sqlite:///{tmp_path}/mlflow.db")
    (tmp_path / name).unlink()


def test_long_requests_have_the_time_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT"):
        monkeypatch.delenv(variable, raising=False)
    with long_requests():
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "600"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "10"


def test_check_store_lets_mlflow_open_other_stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for uri in ("databricks", "databricks://profile", "postgresql://me@db/mlflow", "mysql+pymysql://me@db/mlflow"):
        check_store(uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for uri in ("file:///tmp/mlruns", "mlruns"):
        check_store(uri)
    # As an installed package declares a store.
    (tmp_path / "store-1.dist-info").mkdir()
    (tmp_path / "store-1.dist-info" / "entry_points.txt").write_text("[mlflow.tracking_store]\nfoo = foo:Store\n")
    monkeypatch.syspath_prepend(tmp_path)
    check_store("foo://x")


def test_check_store_knows_the_stores_of_mlflow() -> None:
    import_mlflow()
    from mlflow.tracking._tracking_service.utils import _tracking_store_registry

    asked, refused = {"http", "https", "sqlite", "file", ""}, {"databricks-uc", "uc"}
    of_mlflow = {
        scheme for scheme, build in _tracking_store_registry._registry.items() if build.__module__.startswith("mlflow.")
    }
    assert of_mlflow == {*OTHER_STORES} | asked | refused
