"""Watches every step for signs that training diverges, before a checkpoint can hold what has diverged."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.guard_bounds import Bounds
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.stage import Stage, clock

logger = logging.getLogger(__name__)

ACTIONS = ("warn", "stop", "roll_back")


@dataclass(frozen=True)
class Violation:
    """A metric beyond its bound; `bound` is how an option names it."""

    metric: str
    value: float
    bound: str

    @override
    def __str__(self) -> str:
        return f"{self.metric} is {self.value:.4g} ({self.bound})"


class DivergenceGuard(Callback):
    """Acts on the first step that is beyond a bound. It must stand before the callbacks that save.

    Args:
        bounds: what is watched.
        action: `warn` says so, at the first of the steps in a row that are beyond a bound; `stop` ends the run with an
            error; `roll_back` gives every engine its weights and optimizer back from the newest checkpoint, while the
            data go on behind those of the bad steps.
        folder: of the run, whose checkpoints are rolled back to.
        max_rollbacks: after so many, `roll_back` is `stop`.

    Attributes:
        rollbacks: how often it has rolled back.
    """

    def __init__(
        self, bounds: Bounds, *, action: str = "stop", folder: Path | None = None, max_rollbacks: int = 3
    ) -> None:
        if action not in ACTIONS:
            raise ConfigError(f"action={action!r}: use one of {', '.join(ACTIONS)}")
        if action == "roll_back" and folder is None:
            raise ConfigError("action='roll_back' needs the folder of the run, where PolicyCheckpoint saves")
        self._bounds, self._action, self._max_rollbacks = bounds, action, max_rollbacks
        self._folder = None if folder is None else RunFolder(folder)
        self._average = BestAverage(bounds.reward_window)
        self._warned = False
        self.rollbacks = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        found = list(self._violations(metrics))
        strategy: Any = trainer.strategy
        # The metrics are those of all ranks; should one of them differ all the same, the ranks still act as one.
        if not bool(strategy.max_over_ranks(torch.tensor([float(bool(found))]))):
            self._warned = False
            return
        what = "; ".join(map(str, found)) or "another rank found a metric beyond its bound"
        where = f"step {clock(pl_module)}"
        if self._action == "warn":
            if trainer.is_global_zero and not self._warned:
                logger.warning("%s: %s", where, what)
            self._warned = True
        elif self._action == "roll_back" and self.rollbacks < self._max_rollbacks:
            self._roll_back(trainer, pl_module, f"{where}: {what}")
        else:
            raise ConfigError(f"training diverges at {where}: {what}. {self._way_out()}")

    def _violations(self, metrics: Mapping[str, float]) -> Iterator[Violation]:
        bounds = self._bounds
        norms = [name for name in metrics if name.startswith("train/") and name.endswith("gradient_norm")]
        if bounds.finite:
            for name in ("train/loss", *norms):
                if not math.isfinite(metrics.get(name, 0.0)):
                    yield Violation(name, metrics[name], "guard.finite")
        limits: list[tuple[str, str, float | None, Callable[[float, float], bool]]] = [
            ("train/kl", "guard.kl", bounds.kl, float.__gt__),
            ("train/ppo_kl", "guard.ppo_kl", bounds.ppo_kl, float.__gt__),
            ("train/entropy", "guard.entropy_min", bounds.entropy_min, float.__lt__),
            ("train/entropy", "guard.entropy_max", bounds.entropy_max, float.__gt__),
            ("train/rollout_gap", "guard.rollout_gap", bounds.rollout_gap, float.__gt__),
            *((name, "guard.gradient_norm", bounds.gradient_norm, float.__gt__) for name in norms),
        ]
        for name, option, limit, beyond in limits:
            if limit is not None and name in metrics and beyond(metrics[name], float(limit)):
                yield Violation(name, metrics[name], f"{option}={limit:g}")
        if bounds.reward_drop is not None and "train/reward" in metrics:
            drop = self._average.drop_after(metrics["train/reward"])
            if drop > bounds.reward_drop:
                yield Violation("the fall of train/reward", drop, f"guard.reward_drop={bounds.reward_drop:g}")

    def _roll_back(self, trainer: Trainer, stage: LightningModule, what: str) -> None:
        assert self._folder is not None and isinstance(stage, Stage)
        # One that rank 0 sees: on other machines it may appear later.
        checkpoint = trainer.strategy.broadcast(self._folder.latest_checkpoint())
        if checkpoint is None:
            raise ConfigError(f"training diverges at {what}, and there is no checkpoint yet to roll back to. {_CURE}")
        stage.restore(checkpoint / "state")
        self._average = BestAverage(self._bounds.reward_window)
        self.rollbacks += 1
        stage.track({"guard/rollbacks": float(self.rollbacks)})
        if trainer.is_global_zero:
            message = "%s: rolled back to %s (%d of at most %d times)"
            logger.warning(message, what, checkpoint.name, self.rollbacks, self._max_rollbacks)

    def _way_out(self) -> str:
        newest = None if self._folder is None else self._folder.latest_checkpoint()
        saved = "" if newest is None else f" The newest checkpoint from before is {newest}."
        done = f" It was rolled back {self.rollbacks} times." if self.rollbacks else ""
        return _CURE + done + saved

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "average": self._average.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollbacks = state_dict["rollbacks"]
        self._average.load_state_dict(state_dict["average"])


_CURE = (
    "Lower the learning rate (optimizer.lr), strengthen what holds the policy back (algorithm.kl.coefficient, the clip "
    "range), or widen the bound."
)


class BestAverage:
    """An exponential moving average over about `window` values, and the best it has been.

    Args:
        window: the weight of a new value is `2 / (window + 1)`; the average counts from the `window`-th value on.
    """

    def __init__(self, window: int) -> None:
        self.window, self.count, self.average, self.best = window, 0, 0.0, -math.inf

    def drop_after(self, value: float) -> float:
        """Take in a value; how far the average is below its best, 0 as long as it is young. NaN is left out."""
        if math.isnan(value):
            return 0.0
        self.count += 1
        # The plain mean first, so that the first value has no more weight than others.
        self.average += (value - self.average) * max(2 / (self.window + 1), 1 / self.count)
        if self.count >= self.window:
            self.best = max(self.best, self.average)
        return max(self.best - self.average, 0.0) if self.count >= self.window else 0.0

    def state_dict(self) -> dict[str, Any]:
        """All but the window, which is an option."""
        return {"count": self.count, "average": self.average, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.count, self.average, self.best = state["count"], state["average"], state["best"]
