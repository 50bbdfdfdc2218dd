"""End of training as soon as a validation reaches a reward."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.run_folder import RunFolder, reached_target
from rl_plugins.stages.clock import clock


class TargetReward(Callback):
    """Stop when a validation reaches a reward. A run resumed after such a validation takes no further step.

    The callback reads the metrics file of the run, because the file has the validations before a resume, too.

    Args:
        folder: folder of the run.
        target: smallest `val/reward` that ends training.
    """

    def __init__(self, folder: str | Path, target: float) -> None:
        self._folder, self._target = RunFolder(folder), target

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_reached(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._stop_if_reached(trainer, pl_module)

    def _stop_if_reached(self, trainer: Trainer, stage: LightningModule) -> None:
        # A run trains at least one step: without a step there is nothing to save.
        step = clock(stage)
        reached = trainer.is_global_zero and step > 0 and reached_target(self._folder.metrics, step, self._target)
        if trainer.strategy.broadcast(reached):
            trainer.should_stop = True
