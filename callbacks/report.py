"""The report of a run: written when training ends, by an error too, and sent to MLflow."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.report.page import write_report
from rl_plugins.run_folder import RunFolder


class RunReport(Callback):
    """Writes `report.html`.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and self._folder.metrics.is_file():
            report = write_report(self._folder)
            for logger in trainer.loggers:
                if isinstance(logger, MLflowTracking):
                    logger.log_artifact(report)
