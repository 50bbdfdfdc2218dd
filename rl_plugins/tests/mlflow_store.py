"""An SQLite store of MLflow, made without waiting for the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from rl_plugins.callbacks.mlflow_import import import_mlflow


def make_store(file: Path) -> str:
    """Make a store with all tables and return the URI.

    MLflow makes the tables by some hundred migrations, and SQLite writes each of them to the disk before the next one:
    many seconds where the disk is busy.
    """

    def write_later(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    import_mlflow()
    from mlflow import MlflowClient

    uri = f"sqlite:///{file}"
    event.listen(Engine, "connect", write_later)
    try:
        MlflowClient(uri).search_experiments()
    finally:
        event.remove(Engine, "connect", write_later)
    return uri
