"""MLflow is imported once and quietly, whichever thread needs it first.

Two threads that import it at the same time may each get a part of it: its modules import each other in circles, and
Python then lets a thread go on with what is there.
"""

from __future__ import annotations

import logging
import os
import threading

_LOCK = threading.Lock()


def import_mlflow() -> None:
    """Import it, or wait until another thread has."""
    quiet_mlflow()
    with _LOCK:
        import mlflow  # noqa: F401


def quiet_mlflow() -> None:
    """Before MLflow is imported: no chatter, and a server that is away answers in seconds.

    Its own patience is two minutes of retries.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    os.environ.setdefault("MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT", "600")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # It would tell its makers what it is used for, from machines that often have no way out.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A trace is sent by the thread that makes it, which is not the one that trains.
    os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
