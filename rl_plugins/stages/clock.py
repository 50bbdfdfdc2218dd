"""Stage, clock and metrics of a step, and kind of a validation, for callbacks."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from rl_plugins.errors import ConfigError
from rl_plugins.stages.stage import Stage


def stage_of(module: LightningModule) -> Stage:
    """Return the module that a callback got, which must be a stage.

    Raises:
        ConfigError: the module is not a stage.
    """
    if not isinstance(module, Stage):
        raise ConfigError(f"{type(module).__name__} is not a stage: this callback needs the clock of a stage")
    return module


def clock(module: LightningModule) -> int:
    """Return the step of a stage's clock.

    Raises:
        ConfigError: the module is not a stage.
    """
    return stage_of(module).step


def step_metrics(trainer: Trainer, module: LightningModule) -> dict[str, float]:
    """Return the metrics of the last step, of validations, and metrics that a user logs.

    Lightning's `callback_metrics` also have metrics that only earlier steps had, such as the gradient norm after a step
    that an overflow in float16 left out.

    Raises:
        ConfigError: the module is not a stage.
    """
    stale = stage_of(module).stale_metrics
    return {str(name): float(value) for name, value in trainer.callback_metrics.items() if name not in stale}


def validates_in_training(trainer: Trainer) -> bool:
    """Return True in a validation of a fit, and False in Lightning's sanity check before training."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
