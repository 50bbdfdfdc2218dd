"""Checkpoints of the best steps by a metric. The retention of the newest checkpoints does not remove them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.checkpoint import PolicyCheckpoint
from rl_plugins.callbacks.checkpoint_files import old_files_may_stay, put_in_place, remove_folder
from rl_plugins.errors import ConfigError, StorageError
from rl_plugins.manifest import CheckpointWriter, read_manifest
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.clock import clock, stage_of, step_metrics, validates_in_training
from rl_plugins.text_file import read_json_object
from rl_plugins.whole_file import cannot_write, link_or_copy

_METRIC_FILE = "metric.json"
_SIGNS = {"max": 1, "min": -1}
_NORM_AND_SCALE = ("gradient_norm", "loss_scale")


class BestCheckpoints(Callback):
    """Keep the checkpoints of the best `keep` steps, in folders such as `best_00000050`.

    Place this callback behind `PolicyCheckpoint`. If `PolicyCheckpoint` has saved the step, the files are linked and
    take no further disk space. `rl-plugins export RUN/best_00000050 FOLDER` converts a checkpoint to a Hugging Face
    folder.

    Args:
        folder: folder of the run.
        metric: name of the metric. A metric that starts with `val/` is read after every validation, any other metric
            after each step that `PolicyCheckpoint` has saved.
        mode: `max` if more is better, `min` if less is better.
        keep: number of checkpoints to keep.
    """

    def __init__(self, folder: str | Path, *, metric: str = "val/reward", mode: str = "max", keep: int = 1) -> None:
        if mode not in _SIGNS:
            raise ConfigError(f"mode={mode!r}: use max or min")
        self._folder, self._metric, self._mode, self._keep = RunFolder(folder), metric, mode, keep
        self._sign = _SIGNS[mode]
        self._last_step, self._is_open = -1, False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step, self._is_open = clock(pl_module), False

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if validates_in_training(trainer) and self._metric.startswith("val/"):
            self._consider(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        previous, self._last_step = self._last_step, clock(pl_module)
        # After a roll-back the clock shows the step of the checkpoint again, and the metrics are of the bad step.
        self._is_open = self._last_step > previous and not self._metric.startswith("val/")
        self._consider_saved(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # `PolicyCheckpoint` saves the last step at the end, and `GracefulStop` a step behind this callback.
        self._consider_saved(trainer, pl_module)

    def _consider_saved(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_open and PolicyCheckpoint.of(trainer).saved_step == clock(pl_module):
            self._is_open = False
            self._consider(trainer, pl_module)

    def _consider(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        metrics, step = step_metrics(trainer, pl_module), clock(pl_module)
        if self._metric not in metrics:
            # A step that an overflow in float16 left out has a scale of the loss, and no gradient norm.
            if self._metric in stage_of(pl_module).stale_metrics or self._metric.replace(*_NORM_AND_SCALE) in metrics:
                return
            raise ConfigError(
                f"BestCheckpoints(metric={self._metric!r}) (in a recipe: run.best_metric): there is no such metric; "
                f"the metrics are {', '.join(sorted(metrics))}"
            )
        value = metrics[self._metric]
        # Rank 0 decides for all ranks.
        if not trainer.strategy.broadcast(trainer.is_global_zero and self._is_wanted(value, step)):
            return
        checkpoint, best = PolicyCheckpoint.of(trainer), self._folder.best(step)
        metric = json.dumps({self._metric: value})
        if checkpoint.saved_step != step:
            checkpoint.write(trainer, best, {_METRIC_FILE: metric}, then=lambda: self._remove_worse(trainer))
        else:
            checkpoint.files.when_in_place(lambda: self._link(trainer, step, metric))

    def _link(self, trainer: Trainer, step: int, metric: str) -> None:
        """Give the files of a checkpoint a second name. Collective."""
        checkpoint, best = self._folder.checkpoint(step), self._folder.best(step)
        failure = _link_checkpoint(checkpoint, best, metric) if trainer.is_global_zero else None
        if (failure := trainer.strategy.broadcast(failure)) is not None:
            raise StorageError(failure)
        self._remove_worse(trainer)

    def _remove_worse(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            for old in self._ranked()[self._keep :]:
                with old_files_may_stay(old):
                    remove_folder(old)
        trainer.strategy.barrier("best checkpoints")

    def _is_wanted(self, value: float, step: int) -> bool:
        if math.isnan(value):
            return False
        if (same := self._folder.best(step)).is_dir():
            # A run that was killed after a validation repeats the step.
            return self._sign * value > _score(same, self._metric, self._sign)
        ranked = self._ranked()
        return len(ranked) < self._keep or self._sign * value > _score(ranked[-1], self._metric, self._sign)

    def _ranked(self) -> list[Path]:
        return ranked_bests(self._folder, self._metric, self._mode)


def ranked_bests(folder: RunFolder, metric: str, mode: str) -> list[Path]:
    """Return the best checkpoints of a run, the best one first. Among equal checkpoints the older one is first.

    Raises:
        ConfigError: the metric of a checkpoint is damaged.
    """
    sign = _SIGNS[mode]
    return sorted(folder.bests(), key=lambda path: (-_score(path, metric, sign), path.name))


def _score(path: Path, metric: str, sign: int) -> float:
    """Return the metric of a checkpoint with the sign that makes more better; -inf for an unknown metric.

    Raises:
        ConfigError: the file with the metric is damaged.
    """
    file = path / _METRIC_FILE
    if not file.is_file():
        return -math.inf
    way_out = f"move {path} out of the run's folder, or write {{{json.dumps(metric)}: NUMBER}} into the file"
    value = read_json_object(file, way_out).get(metric, -math.inf * sign)
    if not isinstance(value, int | float):
        raise ConfigError(f"{file}: {metric} is {str(value)[:40]!r}, not a number: {way_out}")
    return sign * value


def _link_checkpoint(checkpoint: Path, best: Path, metric: str) -> str | None:
    """Give the files of a checkpoint a second name; return an error as a line for the user."""
    partial = best.with_name(f".{best.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        # A best checkpoint of another run has a file with its metric, and a write into the link would change the file.
        without_metric = shutil.ignore_patterns(_METRIC_FILE)
        shutil.copytree(checkpoint, partial, ignore=without_metric, copy_function=link_or_copy)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        return cannot_write(best, error)
    writer = CheckpointWriter(partial)
    writer.save_text(metric, partial / _METRIC_FILE)
    return writer.failure or put_in_place(partial, read_manifest(partial) | writer.files, best)
