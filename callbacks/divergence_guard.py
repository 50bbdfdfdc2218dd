"""Guard against divergence: checks the metrics of every step before a checkpoint can save diverged weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from rl_plugins.callbacks.checkpoint import finish_checkpoint, load_rank_states
from rl_plugins.config.run import Bounds
from rl_plugins.errors import ConfigError, TrainingDiverged
from rl_plugins.run_folder import RunFolder
from rl_plugins.stages.clock import clock, step_metrics
from rl_plugins.stages.stage import Stage
from rl_plugins.strategies.contract import strategy_of

logger = logging.getLogger(__name__)

ACTIONS = ("warn", "stop", "roll_back")
_ADVICE = (
    "Lower the learning rate, constrain the policy more (a larger KL coefficient, a smaller clip range), or widen the "
    "bound."
)


class DivergenceGuard(Callback):
    """Act on every step with a metric beyond its bound.

    Place this callback before the callbacks that save.

    Args:
        bounds: bounds on the metrics.
        action: `warn` logs a warning, once for consecutive bad steps. `stop` raises an error. `roll_back` restores
            every model with its optimizer from the newest checkpoint, and training continues with the next data.
        folder: folder of the run, with the checkpoints for `roll_back`.
        max_rollbacks: number of roll-backs after which `roll_back` acts like `stop`.

    Raises:
        TrainingDiverged: a step has diverged, and the guard does not warn or roll back.

    Attributes:
        rollbacks: number of roll-backs so far.

    Example:
        Roll back when the policy collapses::

            guard = DivergenceGuard(Bounds(entropy_min=0.05), action="roll_back", folder=folder)
            Trainer(callbacks=[guard, PolicyCheckpoint(folder, every=50)])
    """

    def __init__(
        self, bounds: Bounds, *, action: str = "stop", folder: str | Path | None = None, max_rollbacks: int = 3
    ) -> None:
        if action not in ACTIONS:
            raise ConfigError(f"action={action!r}: use one of {', '.join(ACTIONS)}")
        if action == "roll_back" and folder is None:
            raise ConfigError("action='roll_back' needs the folder of the run, where PolicyCheckpoint saves")
        self._bounds, self._action, self._max_rollbacks = bounds, action, max_rollbacks
        self._folder = None if folder is None else RunFolder(folder)
        self._reward_average = BestAverage(bounds.reward_window)
        self._warned = False
        self._undone_steps = 0
        self.rollbacks = 0

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        # Lightning validates after every so many batches. After a roll-back, validations stay on the stage's clock.
        undone, self._undone_steps = self._undone_steps, 0
        counts = trainer.fit_loop.epoch_loop.batch_progress.total
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) - undone)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        violations = list(self._violations(step_metrics(trainer, pl_module)))
        # Metrics are equal on all ranks. If they differ on one rank all the same, all ranks still act together.
        if not strategy_of(trainer).ranks.any(bool(violations)):
            self._warned = False
            return
        description = "; ".join(violations) or "another rank found a metric beyond its bound"
        step = f"step {clock(pl_module)}"
        if self._action == "warn":
            if trainer.is_global_zero and not self._warned:
                logger.warning("%s: %s", step, description)
            self._warned = True
            return
        finish_checkpoint(trainer)
        if self._action == "roll_back" and self.rollbacks < self._max_rollbacks:
            self._roll_back(trainer, pl_module, f"{step}: {description}")
        else:
            raise TrainingDiverged(f"training diverges at {step}: {description}. {self._advice()}")

    def _violations(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield each metric beyond its bound, with its value and the bound."""
        bounds = self._bounds
        norms = [name for name in metrics if name.startswith("train/") and name.endswith("gradient_norm")]
        if bounds.finite:
            for name in ("train/loss", *norms):
                if not math.isfinite(metrics.get(name, 0.0)):
                    yield f"{name} is {metrics[name]:.4g} (finite=True)"
        limits: list[tuple[str, str, float | None, Callable[[float, float], bool]]] = [
            ("train/kl", "kl", bounds.kl, float.__gt__),
            ("train/ppo_kl", "ppo_kl", bounds.ppo_kl, float.__gt__),
            ("train/entropy", "entropy_min", bounds.entropy_min, float.__lt__),
            ("train/entropy", "entropy_max", bounds.entropy_max, float.__gt__),
            ("train/rollout_gap", "rollout_gap", bounds.rollout_gap, float.__gt__),
            *((name, "gradient_norm", bounds.gradient_norm, float.__gt__) for name in norms),
        ]
        for name, bound, limit, is_beyond in limits:
            if limit is not None and name in metrics and is_beyond(metrics[name], float(limit)):
                yield f"{name} is {metrics[name]:.4g} ({bound}={limit:g})"
        if bounds.reward_drop is not None and "train/reward" in metrics:
            drop = self._reward_average.drop_after(metrics["train/reward"])
            if drop > bounds.reward_drop:
                yield f"the fall of train/reward is {drop:.4g} (reward_drop={bounds.reward_drop:g})"

    def _roll_back(self, trainer: Trainer, stage: LightningModule, description: str) -> None:
        assert self._folder is not None and isinstance(stage, Stage)
        # Rank 0 chooses: a new checkpoint can appear later on other machines.
        checkpoint = trainer.strategy.broadcast(self._folder.latest_checkpoint())
        if checkpoint is None:
            raise TrainingDiverged(
                f"training diverges at {description}, and there is no checkpoint yet to roll back to. {_ADVICE}"
            )
        step = stage.step
        stage.restore(checkpoint / "state")
        self._undone_steps = step - stage.step
        load_rank_states(trainer, checkpoint)
        self._reward_average = BestAverage(self._bounds.reward_window)
        self.rollbacks += 1
        stage.track({"guard/rollbacks": float(self.rollbacks)})
        if trainer.is_global_zero:
            message = "%s: rolled back to %s (%d of at most %d times)"
            logger.warning(message, description, checkpoint.name, self.rollbacks, self._max_rollbacks)

    def _advice(self) -> str:
        newest = None if self._folder is None else self._folder.latest_checkpoint()
        checkpoint = "" if newest is None else f" The newest checkpoint from before is {newest}."
        rollbacks = f" It was rolled back {self.rollbacks} times." if self.rollbacks else ""
        return _ADVICE + rollbacks + checkpoint

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "average": self._reward_average.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollbacks = state_dict["rollbacks"]
        self._reward_average.load_state_dict(state_dict["average"])


class BestAverage:
    """An exponential moving average over about `window` values, and its best value so far.

    Args:
        window: number of values; the weight of a new value is `2 / (window + 1)`. The best value counts from the
            `window`-th value on.
    """

    def __init__(self, window: int) -> None:
        self.window, self.count, self.average, self.best = window, 0, 0.0, -math.inf

    def drop_after(self, value: float) -> float:
        """Add a value; return the distance of the average below its best value.

        The distance is 0 for the first `window - 1` values. NaN is left out.
        """
        if math.isnan(value):
            return 0.0
        self.count += 1
        # The plain mean at first, so the first value has no more weight than the next ones.
        self.average += (value - self.average) * max(2 / (self.window + 1), 1 / self.count)
        if self.count >= self.window:
            self.best = max(self.best, self.average)
        return max(self.best - self.average, 0.0) if self.count >= self.window else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state without `window`, which is an option."""
        return {"count": self.count, "average": self.average, "best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.count, self.average, self.best = state["count"], state["average"], state["best"]
