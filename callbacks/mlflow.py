"""MLflow as a Lightning logger that never makes training wait, and never makes it stop (see `mlflow_sender`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from typing_extensions import override

from rl_plugins.callbacks.mlflow_run import Facts
from rl_plugins.callbacks.mlflow_sender import FINISH_TIMEOUT_S, Call, RunSender
from rl_plugins.run_folder import RunFolder

_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}


class MLflowTracking(Logger):
    """One MLflow run per training run; a resumed run continues it, without a gap or a repeated point.

    Only rank 0 sends. The metrics are those that a `JsonLinesLogger`, which comes before this one among the trainer's
    loggers, writes to the folder.

    Args:
        uri: of the tracking store.
        experiment: name of the experiment.
        folder: of the run, whose name is that of the MLflow run.
        facts: what is said of the run when it begins.
        finish_timeout_s: how long the end of training waits for what is queued, if the store answers.
    """

    def __init__(
        self,
        *,
        uri: str,
        experiment: str,
        folder: RunFolder,
        facts: Facts | None = None,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self._experiment, self._folder, self._finish_timeout_s = experiment, folder, finish_timeout_s
        self.sender = RunSender(uri, experiment, folder, facts or Facts())

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
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """The resolved configuration is an artifact; nothing is cut to fit."""

    @rank_zero_only
    def log_table(self, data: Mapping[str, list[Any]], file: str) -> None:
        """A table as an artifact that MLflow's pages show; a resumed run that makes it again replaces it."""
        self.submit(lambda run: run.log_table(data, file))

    @rank_zero_only
    def log_artifact(self, path: Path) -> None:
        """A file as an artifact."""
        self.submit(lambda run: run.client.log_artifact(run.run_id, str(path)))

    def submit(self, call: Call) -> None:
        """Have the sending thread make a call, after all earlier ones; it may be made again after a failure."""
        self.sender.submit(call)

    @override
    @rank_zero_only
    def finalize(self, status: str = "success", deadline_s: float | None = None) -> None:
        """Send what is queued, within a deadline, and end the MLflow run."""
        self.sender.finish(_STATUS.get(status, status), self._finish_timeout_s if deadline_s is None else deadline_s)

    def all_sent(self) -> bool:
        """Whether the store has everything, after `finalize`."""
        return self.sender.all_sent()
