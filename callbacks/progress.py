"""One progress bar on the stage's clock: reward, validation and time left. Under Ray the driver draws it."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.stages.stage import clock

_SHOWN = {"train/reward": "reward", "train/loss": "loss", "train/kl": "kl", "val/reward": "val"}


def redraw_interval_s() -> float:
    """Seconds between two drawings: few on a terminal, many where each becomes a line of a file."""
    return 0.5 if sys.stderr.isatty() else 10.0


class StepProgress(Callback):
    """Progress over steps of the stage.

    Args:
        total: steps of the run.
        label: what stands before the bar.
        in_ray: draw through Ray, whose driver places the bars of all processes.
        every_s: seconds between two drawings.
    """

    def __init__(self, total: int, *, label: str, in_ray: bool, every_s: float) -> None:
        self._total, self._label, self._in_ray, self._every_s = total, label, in_ray, every_s
        self._bar: Any = None
        self._drawn = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self._in_ray:
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(desc=self._label, total=self._total, unit="step", flush_interval_s=0)
        else:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=self._label, total=self._total, unit="step", initial=clock(pl_module))
        self._draw(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() - self._drawn >= self._every_s:
            self._draw(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module)

    def _draw(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._bar is None:
            return
        metrics = trainer.callback_metrics
        shown = [f"{short} {float(metrics[name]):.3g}" for name, short in _SHOWN.items() if name in metrics]
        # In this order one drawing shows both.
        self._bar.n = clock(pl_module)
        self._bar.set_description(" ".join([self._label, *shown]))
        self._drawn = time.monotonic()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
