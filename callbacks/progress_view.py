"""How progress is shown: one bar where it can be drawn anew (a terminal, a notebook), else a line every so often."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from shutil import get_terminal_size
from typing import Any, Protocol

LINE_S, SAME_STEP_S = 10.0, 60.0
"""Seconds between two lines; and while no step ends."""
BAR_WIDTH = 48
"""What tqdm draws behind the text: a little bar, steps, time, time left, pace."""


def redraw_interval_s() -> float:
    """Seconds between two drawings of a bar; 0 where nothing can be drawn anew, as in a file."""
    return 0.5 if sys.stderr.isatty() or "ipykernel" in sys.modules else 0.0


@dataclass(frozen=True)
class State:
    """Where a run is.

    Attributes:
        step: steps that are done.
        metrics: the newest ones, as a text.
        step_s: seconds of a step; None before there was one.
        phase: what the step that runs is doing.
    """

    step: int
    metrics: str
    step_s: float | None
    phase: str | None

    def said(self) -> list[str]:
        """Metrics and pace."""
        pace = "" if self.step_s is None else f"{self.step_s:.3g} s/step"
        return [text for text in (self.metrics, pace) if text]


class View(Protocol):
    """Shows a state."""

    def show(self, state: State) -> None:
        """Show it, or leave that for later."""

    def close(self, state: State) -> None:
        """Show the last one."""


class Bar:
    """A bar of tqdm, which says the time left by itself.

    Args:
        total: steps of the run.
        label: what stands before the bar.
        start: the first step.
        in_ray: draw through Ray, whose driver places the bars of all processes.
    """

    def __init__(self, total: int, label: str, start: int, *, in_ray: bool) -> None:
        self._label = label
        self._shown: State | None = None
        self._bar: Any
        if in_ray:
            from ray.experimental import tqdm_ray

            self._bar = tqdm_ray.tqdm(desc=label, total=total, unit="step", flush_interval_s=0)
        else:
            from tqdm.auto import tqdm

            self._bar = tqdm(desc=label, total=total, unit="step", initial=start)

    def show(self, state: State) -> None:
        """Draw what has changed: nothing while the run waits in a debugger."""
        if state == self._shown:
            return
        self._shown = state
        # In this order one drawing shows both.
        self._bar.n = state.step
        self._bar.set_description(self._text(state))

    def _text(self, state: State) -> str:
        """What is done, and as many metrics as leave room for the bar: tqdm would cut off the time left."""
        text = self._label if state.phase is None else f"{self._label} {state.phase}"
        for metric in filter(None, state.metrics.split(", ")):
            if len(text) + len(metric) + 2 > get_terminal_size().columns - BAR_WIDTH:
                break
            text += f", {metric}"
        return text

    def close(self, state: State) -> None:
        """Draw the last state, and let go of the line."""
        self.show(state)
        self._bar.close()


class Lines:
    """Lines for a file.

    Args:
        total: steps of the run.
        label: what stands before each line.
    """

    def __init__(self, total: int, label: str) -> None:
        self._total, self._label = total, label
        self._step, self._metrics, self._time = -1, "", time.monotonic()

    def show(self, state: State) -> None:
        """Write a line, if it is time for one."""
        if time.monotonic() - self._time < (SAME_STEP_S if state.step == self._step else LINE_S):
            return
        ahead = []
        if state.step_s is not None:
            ahead.append(f"{timedelta(seconds=round(state.step_s * (self._total - state.step)))} left")
        if state.phase is not None:
            ahead.append(f"in {state.phase}")
        self._write(state, *ahead)

    def close(self, state: State) -> None:
        """Write the last state, if it has not been written."""
        if (state.step, state.metrics) != (self._step, self._metrics):
            self._write(state)

    def _write(self, state: State, *ahead: str) -> None:
        self._step, self._metrics, self._time = state.step, state.metrics, time.monotonic()
        print(", ".join([f"{self._label}: step {state.step} of {self._total}", *state.said(), *ahead]), flush=True)
