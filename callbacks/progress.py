"""Progress of a run for a reader: a bar in a terminal or a notebook, lines in a file.

A thread shows the progress, so a long phase is visible while it runs, and no step waits for a terminal.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from shutil import get_terminal_size
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.stages.clock import clock, step_metrics
from rl_plugins.strategies.contract import strategy_of

LINE_INTERVAL_S = 10.0
"""Seconds between two lines while steps end."""
SAME_STEP_INTERVAL_S = 60.0
"""Seconds between two lines of the same step."""
BAR_WIDTH = 48
"""Number of columns behind the text, for tqdm: bar, steps, time, time left and pace."""

_SHOWN_METRICS = {
    "train/reward": "reward", "train/accuracy": "accuracy", "train/kl": "kl", "val/reward": "val",
    "val/loss": "val loss", "train/loss": "loss", "train/ppo_kl": "ppo_kl", "idle/trainer": "trainer idle",
    "idle/engine": "engine idle",
}  # fmt: skip
_PACE_STEPS = 32
"""Number of steps for the mean duration of a step, with the validations and checkpoints between the steps."""


class StepProgress(Callback):
    """Show the progress of a run: phase, metrics, pace and time left.

    Args:
        total: number of steps of the run.
        label: text at the start of the bar or of each line.
        in_ray: True if the process runs in a Ray worker: Ray's driver then draws the bars of all processes.
        every_s: seconds between two updates of the bar; 0 writes lines in place of a bar (`redraw_interval_s`).
    """

    def __init__(self, total: int, *, label: str, in_ray: bool, every_s: float) -> None:
        self._total, self._label, self._in_ray, self._every_s = total, label, in_ray, every_s
        self._metrics, self._metrics_read_at = "", 0.0
        self._ends: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS + 1)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._record_step(trainer, pl_module)
        step = clock(pl_module)
        view = (
            Bar(self._total, self._label, step, in_ray=self._in_ray)
            if self._every_s
            else Lines(self._total, self._label)
        )
        self._ended.clear()
        self._thread = threading.Thread(target=self._show, args=(trainer, view), name="progress", daemon=True)
        self._thread.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._thread is not None:
            self._record_step(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._thread is not None:
            self._record_step(trainer, pl_module, last=True)
        self._finish()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish()

    def _record_step(self, trainer: Trainer, pl_module: LightningModule, last: bool = False) -> None:
        now = time.monotonic()
        self._ends.append((now, clock(pl_module)))
        # Lightning computes all metrics at every access, so short steps do not read the metrics each time.
        if last or now - self._metrics_read_at >= (self._every_s or 1.0):
            metrics, self._metrics_read_at = step_metrics(trainer, pl_module), now
            shown = [f"{short} {metrics[name]:.3g}" for name, short in _SHOWN_METRICS.items() if name in metrics]
            self._metrics = ", ".join(shown)

    def _show(self, trainer: Trainer, view: Bar | Lines) -> None:
        while not self._ended.wait(self._every_s or 1.0):
            view.show(self._progress(trainer))
        view.close(self._progress(trainer))

    def _progress(self, trainer: Trainer) -> Progress:
        (first_end, first), (last_end, step) = self._ends[0], self._ends[-1]
        return Progress(
            step=step,
            metrics=self._metrics,
            step_s=(last_end - first_end) / (step - first) if step > first else None,
            phase=strategy_of(trainer).phase_log.current,
        )

    def _finish(self) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: number of finished steps.
        metrics: newest metrics, as text.
        step_s: mean seconds per step; None before the first step has ended.
        phase: running phase of the step; None between two phases.
    """

    step: int
    metrics: str
    step_s: float | None
    phase: str | None


class Bar:
    """A bar of tqdm, which adds the time left.

    Args:
        total: number of steps of the run.
        label: text at the start of the bar.
        start: number of finished steps at the start.
        in_ray: True if Ray's driver draws the bar.
    """

    def __init__(self, total: int, label: str, start: int, *, in_ray: bool) -> None:
        self._label = label
        self._shown: Progress | None = None
        self._bar: Any
        if in_ray:
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(desc=label, total=total, unit="step", flush_interval_s=0)
        else:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=label, total=total, unit="step", initial=start)

    def show(self, progress: Progress) -> None:
        """Draw the bar if the progress has changed. A run that waits in a debugger draws nothing."""
        if progress == self._shown:
            return
        self._shown = progress
        # `set_description` draws the new number of steps as well.
        self._bar.n = progress.step
        self._bar.set_description(self._text(progress))

    def _text(self, progress: Progress) -> str:
        """Return label, phase, and as many metrics as fit. From a longer text, tqdm would cut off the time left."""
        text = self._label if progress.phase is None else f"{self._label} {progress.phase}"
        for metric in filter(None, progress.metrics.split(", ")):
            if len(text) + len(metric) + 2 > get_terminal_size().columns - BAR_WIDTH:
                break
            text += f", {metric}"
        return text

    def close(self, progress: Progress) -> None:
        """Draw the last progress and close the bar."""
        self.show(progress)
        self._bar.close()


class Lines:
    """Lines for a file.

    Args:
        total: number of steps of the run.
        label: text at the start of each line.
    """

    def __init__(self, total: int, label: str) -> None:
        self._total, self._label = total, label
        self._step, self._metrics, self._written_at = -1, "", time.monotonic()

    def show(self, progress: Progress) -> None:
        """Write a line if the last one is old enough."""
        interval_s = SAME_STEP_INTERVAL_S if progress.step == self._step else LINE_INTERVAL_S
        if time.monotonic() - self._written_at < interval_s:
            return
        forecast = []
        if progress.step_s is not None:
            forecast.append(f"{timedelta(seconds=round(progress.step_s * (self._total - progress.step)))} left")
        if progress.phase is not None:
            forecast.append(f"in {progress.phase}")
        self._write(progress, *forecast)

    def close(self, progress: Progress) -> None:
        """Write the last progress if no line shows it yet."""
        if (progress.step, progress.metrics) != (self._step, self._metrics):
            self._write(progress)

    def _write(self, progress: Progress, *forecast: str) -> None:
        self._step, self._metrics, self._written_at = progress.step, progress.metrics, time.monotonic()
        steps = f"{self._label}: step {progress.step} of {self._total}"
        pace = "" if progress.step_s is None else f"{progress.step_s:.3g} s/step"
        print(", ".join(filter(None, [steps, progress.metrics, pace, *forecast])), flush=True)


class DataReport(Callback):
    """Print a line at the start of training for each split and each reason for which prompts were dropped.

    Args:
        label: text at the start of each line.
    """

    def __init__(self, label: str) -> None:
        self._label = label

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        # Lightning's types do not declare `Trainer.datamodule`.
        data: object = getattr(trainer, "datamodule", None)
        reasons = {"dropped_prompts": "are longer than the limit", "dropped_images": "have bad images"}
        for name, reason in reasons.items():
            dropped: dict[str, int] = getattr(data, name, {})
            for split, count in dropped.items():
                if count:
                    print(f"{self._label}: {split}: {count} prompts {reason} and are left out", flush=True)
