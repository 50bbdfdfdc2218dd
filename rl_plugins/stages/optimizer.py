"""Optimizer of each trained model: built from settings, or returned by `configure_optimizers` of a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rl_plugins.errors import ConfigError

MicroBatchLoss = tuple[Tensor, bool]
"""Scalar loss of a micro-batch, and True for the last micro-batch of an optimizer step."""
Optimize = Callable[[Iterable[MicroBatchLoss], str], None]
"""Function that takes one optimizer step of the named model: `Stage.optimize`."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up.

    Attributes:
        lr: learning rate.
        betas: decay rates of the first and second moment.
        weight_decay: decoupled weight decay.
        warmup_steps: stage steps of linear warm-up.
        decay_steps: stage steps over which the rate falls linearly to `lr_end` after the warm-up; 0 keeps it constant.
        lr_end: share of `lr` at the end of the decay.
        gradient_clip: bound on the global gradient norm; 0 for none.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    decay_steps: int = 0
    lr_end: float = 0.0
    gradient_clip: float = 1.0

    def factor(self, step: int) -> float:
        """Return the share of `lr` at a step of the stage."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps == 0:
            return 1.0
        progress = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return 1.0 - (1.0 - self.lr_end) * progress

    def adamw(self, parameters: Iterable[nn.Parameter]) -> dict[str, Any]:
        """Return the optimizer and its schedule in the form of Lightning's `configure_optimizers`."""
        optimizer = AdamW(parameters, lr=self.lr, betas=self.betas, weight_decay=self.weight_decay, fused=True)
        scheduler = LambdaLR(optimizer, self.factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def only_one(configured: Any, owner: object) -> dict[str, Any]:
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
