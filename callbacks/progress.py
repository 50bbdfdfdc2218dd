"""One progress bar on the stage's clock: reward, validation and time left. Under Ray the driver draws it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.stages.stage import clock

_SHOWN = {"train/reward": "reward", "train/loss": "loss", "train/kl": "kl", "val/reward": "val"}


class StepProgress(Callback):
    """Progress over steps of the stage.

    Args:
        total: steps of the run.
        label: what stands before the bar.
        in_ray: draw through Ray, whose driver places the bars of all processes.
    """

    def __init__(self, total: int, *, label: str, in_ray: bool) -> None:
        self._total, self._label, self._in_ray = total, label, in_ray
        self._bar: Any = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self._in_ray:
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(desc=self._label, total=self._total, unit="step")
        else:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=self._label, total=self._total, unit="step")
        self._bar.update(clock(pl_module))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is not None:
            metrics = trainer.callback_metrics
            shown = [f"{short} {float(metrics[name]):.3g}" for name, short in _SHOWN.items() if name in metrics]
            self._bar.set_description(" ".join([self._label, *shown]))
            self._bar.update(1)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
