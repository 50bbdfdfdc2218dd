"""The curves of a run's report as one picture, for those who look at runs in MLflow."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.callbacks.mlflow_run import TrackedRun
from rl_plugins.report.curves import Series, main_curves
from rl_plugins.run_folder import RunFolder, read_metrics

_COLUMNS = 3


class Curves(Callback):
    """Draws the curves when training ends.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = RunFolder(folder)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, MLflowTracking) and trainer.is_global_zero:
                # Drawn where nothing waits for it.
                logger.submit(self.send)

    def send(self, run: TrackedRun) -> None:
        """Draw the curves of the metrics file, and send them."""
        if draw_curves(read_metrics(self._folder.metrics), self._folder.curves):
            run.client.log_artifact(run.run_id, str(self._folder.curves))


def draw_curves(series: Series, path: Path) -> bool:
    """Draw what the report has pictures of; returns whether there was anything."""
    # Without pyplot, which is for the main thread.
    from matplotlib.figure import Figure

    pictures = main_curves(series)
    if not pictures:
        return False
    rows = -(-len(pictures) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 2.6 * rows), layout="constrained")
    for position, (title, curves) in enumerate(pictures.items(), start=1):
        axes = figure.add_subplot(rows, _COLUMNS, position)
        for name, points in curves.items():
            axes.plot(list(points), list(points.values()), marker="." if len(points) < 50 else None, label=name)
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=100)
    return True
