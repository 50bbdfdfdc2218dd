"""Report of a run when training ends: a page in the run's folder and in MLflow, and its curves as a picture."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.report.page import write_report
from rl_plugins.report.pictures import draw_curves
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tracking.loggers import mlflow_loggers
from rl_plugins.tracking.run import TrackedRun
from rl_plugins.whole_file import only_printed


class RunReport(Callback):
    """Write `report.html` at the end of training, also after an error, and upload the page to MLflow.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = RunFolder(folder)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and self._folder.metrics.is_file():
            with only_printed():
                report = write_report(self._folder)
                for logger in mlflow_loggers(trainer.loggers):
                    logger.log_artifact(report)


class Curves(Callback):
    """Draw the main metrics as one picture at the end of training, and upload the picture to MLflow.

    Args:
        folder: folder of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = RunFolder(folder)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            for logger in mlflow_loggers(trainer.loggers):
                # The sender thread draws the picture, so training does not wait.
                logger.submit(self.send)

    def send(self, run: TrackedRun) -> None:
        """Draw the metrics of the metrics file, and upload the picture."""
        with only_printed():
            if not draw_curves(read_metrics(self._folder.metrics), self._folder.curves):
                return
            run.client.log_artifact(run.run_id, str(self._folder.curves))
