"""The curves of a run as one picture, in its folder and in MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.callbacks.mlflow_run import TrackedRun
from rl_plugins.run_folder import RunFolder, read_metrics

SHOWN = (
    "val/reward", "train/reward", "val/accuracy", "val/loss", "train/loss", "train/kl", "train/entropy",
    "train/response_length", "train/gradient_norm", "train/rollout_gap_max", "time/step",
)  # fmt: skip
"""Metrics that get a panel, where the run has them."""

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
                logger.submit(self._send)

    def _send(self, run: TrackedRun) -> None:
        if draw_curves(read_metrics(self._folder.metrics), self._folder.curves):
            run.client.log_artifact(run.run_id, str(self._folder.curves))


def draw_curves(series: Mapping[str, Mapping[int, float]], path: Path) -> bool:
    """Draw what there is of `SHOWN`; returns whether there was anything."""
    # Without pyplot, which is for the main thread.
    from matplotlib.figure import Figure

    names = [name for name in SHOWN if series.get(name)]
    if not names:
        return False
    rows = -(-len(names) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 2.6 * rows), layout="constrained")
    for position, name in enumerate(names, start=1):
        axes = figure.add_subplot(rows, _COLUMNS, position)
        axes.plot(list(series[name]), list(series[name].values()), marker="." if len(series[name]) < 50 else None)
        axes.set_title(name, fontsize="medium")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    return True
