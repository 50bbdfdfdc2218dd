"""A table of what the policy said at each validation, as a file and in MLflow."""

from __future__ import annotations

import json
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.mlflow import MLflowTracking
from rl_plugins.stages.sampling import SamplingStage
from rl_plugins.whole_file import write_whole_text


class SampleTable(Callback):
    """Keeps the first rows of rank 0's validation samples.

    Args:
        folder: gets `step_00000020.json` for each validation.
        rows: how many samples to keep.
    """

    def __init__(self, folder: Path, *, rows: int = 32) -> None:
        self._folder, self._rows = folder, rows

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or not isinstance(pl_module, SamplingStage):
            return
        rows = pl_module.validation_samples[: self._rows]
        name = f"step_{pl_module.step:08d}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole_text(self._folder / name, json.dumps(rows, indent=1, ensure_ascii=False))
        for logger in trainer.loggers:
            if isinstance(logger, MLflowTracking):
                log_samples(logger, self._folder / name)


def log_samples(tracking: MLflowTracking, file: Path) -> None:
    """Send a file of samples as a table."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    if rows:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        tracking.log_table(columns, f"samples/{file.name}")
