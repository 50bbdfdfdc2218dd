"""Stage and clock of a callback."""

from __future__ import annotations

from lightning.pytorch import LightningModule

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
