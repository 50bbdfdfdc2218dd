"""Keeps the checkpoints of the best steps by a metric, whatever becomes of the newest ones."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint, remove, write_checkpoint
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.stage import clock

_FILE = "metric.json"
_SIGNS = {"max": 1, "min": -1}


class BestCheckpoints(Callback):
    """Saves the best `keep` steps as `best_00000050`, looking at a metric of validation or of training steps.

    A step that `PolicyCheckpoint` has saved, before this callback, is linked and takes no room of its own. It is
    `rl-plugins export RUN/best_00000050 FOLDER` that makes a model of one.

    Args:
        folder: of the run.
        metric: a metric that starts with `val/` is looked at after every validation, any other one whenever
            `PolicyCheckpoint` has saved.
        mode: `max` or `min`.
        keep: how many.
    """

    def __init__(self, folder: Path, *, metric: str = "val/reward", mode: str = "max", keep: int = 1) -> None:
        if mode not in _SIGNS:
            raise ConfigError(f"mode={mode!r}: use max or min")
        self._folder, self._metric, self._mode, self._keep = RunFolder(folder), metric, mode, keep
        self._sign = _SIGNS[mode]
        self._looked_at = -1

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        if fitting and self._metric.startswith("val/"):
            self._consider(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._metric.startswith("val/") and PolicyCheckpoint.of(trainer).saved_step == clock(pl_module):
            self._consider(trainer, pl_module)

    def _consider(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._metric not in trainer.callback_metrics:
            there = ", ".join(sorted(map(str, trainer.callback_metrics)))
            raise ConfigError(f"run.best_metric={self._metric}: there is no such metric; there is {there}")
        value, step = float(trainer.callback_metrics[self._metric]), clock(pl_module)
        if step == self._looked_at:
            # A run that was rolled back comes by its checkpoint again, with the numbers of a bad step.
            return
        self._looked_at = step
        # What rank 0 decides, all do.
        if not trainer.strategy.broadcast(trainer.is_global_zero and self._is_wanted(value, step)):
            return
        best = self._folder.best(step)
        if PolicyCheckpoint.of(trainer).saved_step != step:
            write_checkpoint(trainer, best)
        elif trainer.is_global_zero:
            partial = best.with_name(f".{best.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self._folder.checkpoint(step), partial, copy_function=_link)
            os.replace(partial, best)
        if trainer.is_global_zero:
            (best / _FILE).write_text(json.dumps({self._metric: value}), encoding="utf-8")
            for old in self._ranked()[self._keep :]:
                remove(old)
        trainer.strategy.barrier("best checkpoints")

    def _is_wanted(self, value: float, step: int) -> bool:
        if math.isnan(value) or self._folder.best(step).is_dir():
            return False
        ranked = self._ranked()
        return len(ranked) < self._keep or self._sign * value > _rank(ranked[-1], self._metric, self._sign)

    def _ranked(self) -> list[Path]:
        return ranked_bests(self._folder, self._metric, self._mode)


def ranked_bests(folder: RunFolder, metric: str, mode: str) -> list[Path]:
    """The best checkpoints of a run so far, the best one first, of equals the older."""
    sign = _SIGNS[mode]
    return sorted(folder.bests(), key=lambda path: (-_rank(path, metric, sign), path.name))


def _rank(path: Path, metric: str, sign: int) -> float:
    file = path / _FILE
    if not file.is_file():
        # Killed before it was written: the first to go.
        return -math.inf
    value: float = json.loads(file.read_text(encoding="utf-8")).get(metric, -math.inf * sign)
    return sign * value


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Not every file system has links.
        shutil.copy2(source, target)
