"""Optimizer of each trained model: built from settings, or returned by `configure_optimizers` of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from rl_plugins.errors import ConfigError

MicroBatchLoss = tuple[Tensor, bool]
"""Scalar loss of a micro-batch, and True for the last micro-batch of an optimizer step."""
Optimize = Callable[[Iterable[MicroBatchLoss], str], None]
"""Function that takes one optimizer step of the named model: `Stage.optimize`."""


def only_one(configured: object, owner: object) -> dict[str, Any]:
    """Convert the result of `configure_optimizers`, in any of Lightning's forms, to a dict of one optimizer.

    Raises:
        ConfigError: there is no optimizer, or more than one optimizer or scheduler.
    """
    schedulers: Any = []
    if isinstance(configured, list | tuple) and len(configured) == 2 and isinstance(configured[0], list | tuple):
        configured, schedulers = configured
    optimizers = list(configured) if isinstance(configured, list | tuple) else [configured]
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer | dict) or len(schedulers) > 1:
        raise ConfigError(
            f"{type(owner).__name__}.configure_optimizers must return one optimizer with at most one scheduler: "
            "each trained model has one optimizer"
        )
    single = optimizers[0] if isinstance(optimizers[0], dict) else {"optimizer": optimizers[0]}
    return {**single, "lr_scheduler": schedulers[0]} if schedulers else single
