"""Progress on the stage's clock: phase, reward, KL, pace, time left.

A thread shows it, so that a long phase is seen while it lasts and no step waits for a terminal.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.progress_view import Bar, Lines, State, View
from rl_plugins.stages.stage import clock

_SHOWN = {
    "train/reward": "reward", "train/accuracy": "accuracy", "train/kl": "kl", "val/reward": "val", "train/loss": "loss",
    "train/ppo_kl": "ppo_kl", "idle/trainer": "trainer idle", "idle/engine": "engine idle",
}  # fmt: skip
_WINDOW = 32
"""Steps whose duration says how long the next ones take; validations and checkpoints between them are included."""


class StepProgress(Callback):
    """Progress over steps of the stage.

    Args:
        total: steps of the run.
        label: what stands before all.
        in_ray: draw a bar through Ray, whose driver places the bars of all processes.
        every_s: seconds between two drawings of a bar; 0 writes lines in its place, every ten seconds.
    """

    def __init__(self, total: int, *, label: str, in_ray: bool, every_s: float) -> None:
        self._total, self._label, self._in_ray, self._every_s = total, label, in_ray, every_s
        self._metrics, self._taken = "", 0.0
        self._ends: deque[tuple[float, int]] = deque(maxlen=_WINDOW + 1)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._take_in(trainer, pl_module)
        step = clock(pl_module)
        view: View = (
            Bar(self._total, self._label, step, in_ray=self._in_ray)
            if self._every_s
            else Lines(self._total, self._label)
        )
        self._ended.clear()
        self._thread = threading.Thread(target=self._watch, args=(trainer, view), name="progress", daemon=True)
        self._thread.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._thread is not None:
            self._take_in(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._thread is not None:
            self._take_in(trainer, pl_module, last=True)
        self._finish()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()

    def _take_in(self, trainer: Trainer, pl_module: LightningModule, last: bool = False) -> None:
        now = time.monotonic()
        self._ends.append((now, clock(pl_module)))
        # Lightning works out all metrics when it is asked for them: not after each of many short steps.
        if last or now - self._taken >= (self._every_s or 1.0):
            metrics, self._taken = trainer.callback_metrics, now
            shown = [f"{short} {float(metrics[name]):.3g}" for name, short in _SHOWN.items() if name in metrics]
            self._metrics = ", ".join(shown)

    def _watch(self, trainer: Trainer, view: View) -> None:
        while not self._ended.wait(self._every_s or 1.0):
            view.show(self._state(trainer))
        view.close(self._state(trainer))

    def _state(self, trainer: Trainer) -> State:
        (start, first), (end, step) = self._ends[0], self._ends[-1]
        phases: Any = getattr(trainer.strategy, "phases", None)
        return State(
            step=step,
            metrics=self._metrics,
            step_s=(end - start) / (step - first) if step > first else None,
            phase=None if phases is None else phases.current,
        )

    def _finish(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
