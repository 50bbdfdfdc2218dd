"""An MLflow store: a server (`http://...`) or an SQLite file (`sqlite:///...`)."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from filelock import FileLock

from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from mlflow import MlflowClient

STORE_FILE, ARTIFACTS = "mlflow.db", "mlartifacts"
"""Names of the store and of its artifacts in a folder of runs."""
DELETED = "deleted"
"""Lifecycle stage of a deleted experiment or run."""

OTHER_STORES = ("databricks", "postgresql", "mysql", "mssql")
"""Schemes of MLflow's stores beside servers, SQLite files and folders."""

_CONNECT_TIMEOUT_S = 3.0
_REQUEST_TIMEOUT, _TRANSFER_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT"
"""Variables of MLflow, in seconds."""
_OPEN_TIMEOUT_S = 120.0
_SQLITE = "sqlite:///"
_CORRECT = (
    f"write http://HOST:PORT for a server or {_SQLITE}/FOLDER/mlflow.db for a file, or leave out tracking.uri and "
    "MLFLOW_TRACKING_URI for a file in run.output_dir"
)
_STORE_VARIABLE = "MLFLOW_TRACKING_URI"
# MLflow's page of an experiment of this kind begins with the charts of metrics. MLflow would ask for the kind.
_TAGS = {"mlflow.experimentKind": "custom_model_development"}


def store_beside(folder: Path) -> str:
    """Return the URI of the store in a folder of runs, an SQLite file."""
    return f"{_SQLITE}{folder.absolute() / STORE_FILE}"


def import_mlflow() -> None:
    """Import MLflow with the settings of `configure_mlflow`.

    Every thread calls this function before its first import of a module inside `mlflow`. MLflow's modules import each
    other in circles. If two threads begin with different modules, each thread can wait for the module of the other;
    Python breaks such a deadlock by giving one thread an incomplete module. If all threads begin with `mlflow` itself,
    Python's lock of this module lets the threads in one after another.
    """
    configure_mlflow()
    import mlflow  # noqa: F401


def configure_mlflow() -> None:
    """Set defaults in the environment, before MLflow is imported: few messages and short timeouts.

    By default MLflow retries a request for two minutes.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault(_REQUEST_TIMEOUT, "10")
    os.environ.setdefault(_TRANSFER_TIMEOUT, "600")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # Training machines often have no access to the internet.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # The sender thread logs a trace, so the training thread does not wait for the store.
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def long_requests() -> Iterator[None]:
    """Let requests inside this context take as long as the transfer of a large file.

    An MLflow server answers an upload when its own storage has the file.
    """
    configure_mlflow()
    before = os.environ[_REQUEST_TIMEOUT]
    os.environ[_REQUEST_TIMEOUT] = os.environ[_TRANSFER_TIMEOUT]
    try:
        yield
    finally:
        os.environ[_REQUEST_TIMEOUT] = before


def check_store(uri: str) -> None:
    """Check a store: a server must answer; the folder of an SQLite file must be writable.

    Other databases, Databricks and stores of other packages are not asked.

    Raises:
        ConfigError: no server answers, the folder is missing or read-only, or MLflow opens no such store.
    """
    try:
        url = urlparse(uri)
    except ValueError as error:
        raise ConfigError(f"MLflow store {uri}: no address ({error}): {_CORRECT}") from None
    if url.scheme in ("http", "https"):
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname or "", port), timeout=_CONNECT_TIMEOUT_S).close()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"MLflow store {uri}: no server answers there ({getattr(error, 'strerror', None) or error}): start the "
                "server (mlflow server), correct tracking.uri or MLFLOW_TRACKING_URI, or switch tracking off with "
                "tracking.enabled=false"
            ) from None
    elif (file := sqlite_file(uri)) is not None:
        folder = file.parent
        if file.is_dir():
            raise ConfigError(f"MLflow store {uri}: {file} is a folder: {_CORRECT}")
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"MLflow store {uri}: the folder {folder} does not exist or cannot be written: make the folder, or "
                "leave out tracking.uri and MLFLOW_TRACKING_URI for a file in run.output_dir"
            )
        for path in (file, Path(f"{file}.lock")):
            if path.exists() and not os.access(path, os.W_OK):
                raise ConfigError(
                    f"MLflow store {uri}: {path} of another user cannot be written: use a server, or a file of your own"
                )
    # A database may have a driver: mysql+pymysql.
    elif uri != "databricks" and url.scheme.partition("+")[0] not in _schemes():
        raise ConfigError(f"MLflow store {uri}: MLflow opens no such store: {_CORRECT}")


def _schemes() -> set[str]:
    """Return the schemes of stores that `check_store` does not ask, without an import of MLflow."""
    of_packages = {entry.name for entry in entry_points(group="mlflow.tracking_store")}
    # MLflow refuses folders without this variable.
    of_folders = {"", "file"} if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1") else set()
    return {*OTHER_STORES, *of_packages, *of_folders}


def open_client(uri: str) -> MlflowClient:
    """Return a client of a store. MLflow makes or updates the tables of an SQLite file when the client is made.

    MLflow has no lock for this work, and two processes that do it at once damage the file. So a process waits until no
    other process opens the file. A new file gets its name when its tables are complete, because a process that is
    killed in the work leaves a file that MLflow cannot open.

    Raises:
        TimeoutError: another process has the lock for too long.
    """
    from mlflow import MlflowClient

    file = sqlite_file(uri)
    if file is None:
        return MlflowClient(uri)
    with FileLock(f"{file}.lock", timeout=_OPEN_TIMEOUT_S):
        if not file.exists():
            partial = file.with_name(f"{file.name}.partial")
            # SQLite would apply the journal of a killed process to the new file.
            for suffix in ("", "-journal", "-wal", "-shm"):
                Path(f"{partial}{suffix}").unlink(missing_ok=True)
            MlflowClient(f"{_SQLITE}{partial}")
            partial.replace(file)
        return MlflowClient(uri)


def use_store(uri: str) -> None:
    """Set the store for MLflow's functions without a client: tables, traces, downloads.

    `mlflow.set_tracking_uri` also sets an environment variable, which would give this store to later runs of the
    process and to child processes. The variable is restored here.
    """
    import mlflow

    previous = os.environ.get(_STORE_VARIABLE)
    mlflow.set_tracking_uri(uri)
    if previous is None:
        os.environ.pop(_STORE_VARIABLE, None)
    else:
        os.environ[_STORE_VARIABLE] = previous


def find_experiment(client: MlflowClient, uri: str, name: str) -> str:
    """Return the id of an experiment. A missing experiment is created.

    Raises:
        ConfigError: the experiment is deleted. MLflow does not give its name to a new experiment.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return client.create_experiment(name, _artifact_location(uri), _TAGS)
    if experiment.lifecycle_stage == DELETED:
        raise ConfigError(
            f"the experiment {name!r} is deleted: restore it (mlflow experiments restore --experiment-id "
            f"{experiment.experiment_id}), or choose another name (tracking.experiment; of a pipeline: experiment)"
        )
    return experiment.experiment_id


def _artifact_location(uri: str) -> str | None:
    """Return the folder of a new experiment's artifacts: beside an SQLite file; None lets a server choose.

    For SQLite, MLflow's default is the working directory, and the working directory of a Ray worker is temporary.
    """
    file = sqlite_file(uri)
    return None if file is None else (file.absolute().parent / ARTIFACTS).as_uri()


def sqlite_file(uri: str) -> Path | None:
    """Return the file of an SQLite store, or None for a server."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None
