"""Lightning loggers of a run: for a metrics file in the run's folder, and for MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from rl_plugins.run_folder import RunFolder, append_metrics
from rl_plugins.tracking.run import RunDescription
from rl_plugins.tracking.sender import FINISH_TIMEOUT_S, Call, RunSender

_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}


class JsonLinesLogger(Logger):
    """Append `{"step": n, "time": seconds since 1970, "train/reward": ...}` for every call of `log_metrics`.

    A resumed run can write a step twice; `run_folder.read_metrics` takes the later line.

    Args:
        path: metrics file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    @property
    @override
    def name(self) -> str:
        return "metrics"

    @property
    @override
    def version(self) -> str:
        return ""

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        append_metrics(self._path, metrics, step)

    @override
    @rank_zero_only
    def log_hyperparams(self, params: object, *args: object, **kwargs: object) -> None:
        """Do nothing: the resolved configuration is a file in the run's folder."""


class MLflowTracking(Logger):
    """One MLflow run per training run; a resumed run continues its MLflow run without a gap or a repeated point.

    Rank 0 sends, in a thread of its own (see `RunSender`), so training never waits for MLflow, and an outage of MLflow
    never stops training. The metrics are read from the file of a `JsonLinesLogger`. Put the `JsonLinesLogger` before
    this logger in `Trainer(logger=[...])`.

    Args:
        uri: address of the MLflow store.
        experiment: name of the experiment.
        folder: folder of the run; its name is the name of the MLflow run.
        description: description to record when the run starts.
        finish_timeout_s: longest wait for queued calls at the end of training, in seconds.
    """

    def __init__(
        self,
        *,
        uri: str,
        experiment: str,
        folder: RunFolder,
        description: RunDescription | None = None,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self._experiment, self._folder, self._finish_timeout_s = experiment, folder, finish_timeout_s
        self.sender = RunSender(uri, experiment, folder, description or RunDescription())

    @property
    @override
    def name(self) -> str:
        return self._experiment

    @property
    @override
    def version(self) -> str:
        return self._folder.path.name

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.sender.send_metrics()

    @override
    @rank_zero_only
    def log_hyperparams(self, params: object, *args: object, **kwargs: object) -> None:
        """Do nothing: the resolved configuration is an artifact, where MLflow does not limit its length."""

    @rank_zero_only
    def log_table(self, columns: Mapping[str, Sequence[object]], file: str) -> None:
        """Queue a table for MLflow's pages. A table of the same name is replaced.

        Args:
            columns: values of each column.
            file: path of the artifact.
        """
        self.offer(lambda run: run.log_table(columns, file))

    @rank_zero_only
    def log_artifact(self, path: Path) -> None:
        """Queue a file as an artifact."""
        self.submit(lambda run: run.client.log_artifact(run.run_id, str(path)))

    def submit(self, call: Call) -> None:
        """Queue a call for the sender thread, behind all earlier calls. A failed call is made again."""
        self.sender.submit(call)

    def offer(self, call: Call) -> None:
        """Queue a call with a trace or a table. A full queue, after a long outage of the store, drops the call."""
        self.sender.offer(call)

    @override
    @rank_zero_only
    def finalize(self, status: str = "success", deadline_s: float | None = None) -> None:
        """Send the queued calls and end the MLflow run.

        Args:
            status: Lightning's or MLflow's name of the status. For Lightning, a run that stopped on request has
                succeeded; its status is KILLED.
            deadline_s: seconds to wait; `finish_timeout_s` by default.
        """
        status = _STATUS.get(status, status)
        if status == "FINISHED" and self._folder.stopped.is_file():
            status = "KILLED"
        self.sender.finish(status, self._finish_timeout_s if deadline_s is None else deadline_s)

    @rank_zero_only
    def fail(self) -> None:
        """Give the MLflow run the status FAILED, also after its end."""
        self.sender.send_metrics()
        self.finalize("failed")

    def all_sent(self) -> bool:
        """Return True if the store has everything, after `finalize`."""
        return self.sender.all_sent()


def mlflow_loggers(loggers: Sequence[object]) -> list[MLflowTracking]:
    """Return the MLflow loggers among the loggers of a trainer."""
    return [logger for logger in loggers if isinstance(logger, MLflowTracking)]
