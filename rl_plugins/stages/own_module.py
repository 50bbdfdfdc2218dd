"""A user's LightningModule whose model a stage trains: its hooks of training, and its hyperparameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from rl_plugins.errors import ConfigError

_CALLED = (
    "configure_callbacks", "setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end",
    "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip
_WAY_OUT = {
    "configure_gradient_clipping": "set Trainer(gradient_clip_val=...)",
    "lr_scheduler_step": "return a schedule of steps or epochs from configure_optimizers",
    "optimizer_step": "move the code to on_before_optimizer_step",
    "optimizer_zero_grad": "move the code to on_before_optimizer_step",
    "on_before_zero_grad": "move the code to on_before_optimizer_step",
    "backward": "move the code to on_before_backward",
}
"""Methods that change an optimizer step, which a stage takes by itself."""


def call_hooks_of(module: LightningModule, stage: LightningModule) -> None:
    """Let a stage call the hooks of training that a module overrides, each after the stage's own hook.

    Steps, data loaders, and the hooks of validation, test and prediction belong to the module's own steps, and are not
    called.

    Args:
        module: module whose model the stage trains.
        stage: stage in its constructor.

    Raises:
        ConfigError: the module overrides a method that changes an optimizer step.
    """
    for name, way_out in _WAY_OUT.items():
        if is_overridden(name, module):
            raise ConfigError(
                f"{type(module).__name__}.{name} is not called, because a stage takes optimizer steps by itself: "
                f"{way_out}, or pass the .model of the module"
            )
    for name in _CALLED:
        if is_overridden(name, module):
            setattr(stage, name, partial(_call_both, module, stage, getattr(stage, name), getattr(module, name)))


def _call_both(
    module: LightningModule,
    stage: LightningModule,
    of_stage: Callable[..., Any],
    of_module: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    module.trainer = stage.trainer
    # `self.log` of the module asks for the current hook.
    module._current_fx_name = stage._current_fx_name
    result = of_stage(*args, **kwargs)
    own = of_module(*args, **kwargs)
    return result if own is None else own


def log_hyperparameters(module: LightningModule, trainer: Trainer) -> None:
    """Send the hyperparameters of a module to all loggers, unless the module keeps them from loggers."""
    if module._log_hyperparams:
        for logger in trainer.loggers:
            logger.log_hyperparams(dict(module.hparams_initial))
