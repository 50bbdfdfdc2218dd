"""MLflow as a Lightning logger that never makes training wait, and never makes it stop.

Calls go to a queue; one thread of rank 0 sends them through Lightning's `MLFlowLogger`. While the server is away they
stay in the queue, in order, and are tried again; what could not be sent when the run ends is counted and said.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

logger = logging.getLogger(__name__)

_RETRY_S = 5.0
_FINISH_TIMEOUT_S = 60.0


class MLflowTracking(Logger):
    """One MLflow run per training run; a resumed run continues it.

    Only the sending thread of rank 0 imports MLflow and opens the store: several ranks that create one SQLite store at
    once would break it.

    Args:
        uri: of the tracking store.
        experiment: name of the experiment.
        run_name: name of the run.
        run_id_file: holds the id of the run once it exists.
        config_file: the resolved configuration, logged as an artifact.
        parent_run: id of the run that this one belongs to.
    """

    def __init__(
        self,
        *,
        uri: str,
        experiment: str,
        run_name: str,
        run_id_file: Path,
        config_file: Path | None = None,
        parent_run: str | None = None,
    ) -> None:
        super().__init__()
        self._uri, self._experiment, self._run_name = uri, experiment, run_name
        self._run_id_file, self._config_file = run_id_file, config_file
        self._tags = {} if parent_run is None else {"mlflow.parentRunId": parent_run}
        self._queue: queue.Queue[Callable[[MLFlowLogger], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self.failures = 0

    @property
    @override
    def name(self) -> str:
        return self._experiment

    @property
    @override
    def version(self) -> str:
        return self._run_name

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.submit(lambda mlflow: mlflow.log_metrics(metrics, step))

    @override
    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration is an artifact; nothing is cut to fit."""

    @rank_zero_only
    def log_table(self, data: Mapping[str, list[Any]], file: str) -> None:
        """A table as an artifact that MLflow's pages show."""
        self.submit(lambda mlflow: mlflow.experiment.log_table(mlflow.run_id, dict(data), file))

    @rank_zero_only
    def log_artifact(self, path: Path) -> None:
        """A file as an artifact."""
        self.submit(lambda mlflow: mlflow.experiment.log_artifact(mlflow.run_id, str(path)))

    def submit(self, call: Callable[[MLFlowLogger], None]) -> None:
        """Have the sending thread make a call, after all earlier ones."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="mlflow", daemon=True)
            self._thread.start()
        self._queue.put(call)

    @override
    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Send what is queued, within a deadline, and end the MLflow run."""
        if self._thread is None:
            return
        self.submit(lambda mlflow: mlflow.finalize(status))
        self._queue.put(None)
        self._ending.set()
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._queue.qsize():
            logger.error(
                "MLflow at %s did not take the last %d calls; the metrics are in the run's metrics.jsonl",
                self._uri,
                self._queue.qsize(),
            )
        self._thread = None

    def _send(self) -> None:
        quiet_mlflow()
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        logging.getLogger("lightning.pytorch.loggers.mlflow").setLevel(logging.ERROR)
        mlflow: MLFlowLogger | None = None
        while (call := self._queue.get()) is not None:
            while True:
                try:
                    mlflow = mlflow or self._open()
                    call(mlflow)
                    break
                except (MlflowException, SQLAlchemyError, OSError) as error:
                    self.failures += 1
                    if self.failures == 1:
                        logger.error("MLflow at %s is away, metrics wait for it: %s", self._uri, error)
                    if self._ending.is_set():
                        return
                    self._ending.wait(_RETRY_S)

    def _open(self) -> MLFlowLogger:
        run_id = self._run_id_file.read_text().strip() if self._run_id_file.is_file() else None
        mlflow = MLFlowLogger(
            self._experiment,
            run_name=self._run_name,
            tracking_uri=self._uri,
            tags=self._tags,
            run_id=run_id,
            artifact_location=artifact_location(self._uri),
        )
        if run_id is None:
            assert mlflow.run_id is not None
            self._run_id_file.write_text(mlflow.run_id)
            if self._config_file is not None and self._config_file.is_file():
                mlflow.experiment.log_artifact(mlflow.run_id, str(self._config_file))
        return mlflow


def quiet_mlflow() -> None:
    """Before MLflow is imported: no chatter, and a server that is away answers in seconds.

    Its own patience is two minutes of retries.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)


def artifact_location(uri: str) -> str | None:
    """Where a new experiment keeps its artifacts: beside an SQLite store; a server knows itself.

    MLflow's default for SQLite is the working directory, and that of a Ray worker is a temporary one.
    """
    prefix = "sqlite:///"
    if not uri.startswith(prefix):
        return None
    return (Path(uri.removeprefix(prefix)).absolute().parent / "mlartifacts").as_uri()
