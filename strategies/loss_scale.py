"""Scale of the loss for passes in float16, whose smallest gradients would be 0 without a scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from torch import Tensor

from rl_plugins.config.precision import dtype_of_passes
from rl_plugins.errors import ConfigError

_SMALLEST = 1.0
GOOD_STEPS = 2000
"""Number of steps in a row without an overflow, after which the scale is doubled."""


@dataclass
class LossScale:
    """Dynamic scale of the loss of one model.

    The backward pass begins with the scaled loss, and the gradients are divided by the scale before they are clipped.
    An overflow makes a gradient infinite or NaN: the step is left out, and the scale is halved. The numbers are those
    of `torch.amp.GradScaler`. That class tests all gradients in a further pass, and its result is equal only on the
    ranks that share the first gradient, so with expert or tensor parallelism some ranks could step alone. The norm for
    clipping is equal on all ranks, and is not finite if any gradient is not finite.

    At a scale of 1, a gradient that is not finite is no fault of the scale, and its norm counts as in other precisions.

    Attributes:
        value: factor of the next loss, a power of two.
        good_steps: number of steps since the last change of the scale.
        skipped: number of steps that were left out.
    """

    value: float = 2.0**16
    good_steps: int = 0
    skipped: int = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, in float32, because the product of a float16 loss would overflow."""
        return loss.float() * self.value

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        for gradient in gradients:
            gradient.mul_(1 / self.value)

    def update(self, norm: float) -> bool:
        """Set the scale of the next step; return False if the step must be left out.

        Args:
            norm: global norm of the gradients, equal on all ranks.
        """
        if not math.isfinite(norm):
            self.value, self.good_steps = max(self.value / 2, _SMALLEST), 0
            self.skipped += 1
            return False
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS:
            self.value, self.good_steps = self.value * 2, 0
        return True

    def known_norm(self, norm: float) -> float | None:
        """Return the norm for metrics, after `update`; None after an overflow that a smaller scale may prevent."""
        return norm if math.isfinite(norm) or self.value <= _SMALLEST else None


def scale_of_engine(engine: Any) -> LossScale | None:
    """Return the scale that an engine of DeepSpeed keeps by itself; None without float16."""
    if not engine.fp16_enabled():
        return None
    return LossScale(float(engine.optimizer.loss_scale), skipped=engine.skipped_steps)


def norm_of_engine(engine: Any) -> float | None:
    """Return the norm of the last gradient of an engine of DeepSpeed, for metrics; see `LossScale.known_norm`."""
    norm, scale = engine.get_global_grad_norm(), scale_of_engine(engine)
    if norm is None:
        return None
    return float(norm) if scale is None else scale.known_norm(float(norm))


def allow_smallest_scale(engine: Any) -> Any:
    """Let an engine of DeepSpeed train on at the smallest scale, as `LossScale` does, in place of ending the run."""
    if engine.fp16_enabled():
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    return engine


def precision_of_deepspeed(plugin: Precision) -> DeepSpeedPrecision:
    """Return Lightning's precision plugin for DeepSpeed, with the precision of a plugin.

    Raises:
        ConfigError: DeepSpeed has no float16 on this device.
    """
    precision = str(plugin.precision)
    if dtype_of_passes(precision) == "float16":
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            raise ConfigError(
                f"precision={precision}: DeepSpeed has no float16 on this device: use FSDPStrategy (in a recipe: "
                "strategy.name=fsdp), or another precision"
            )
    if isinstance(plugin, DeepSpeedPrecision):
        return plugin
    return DeepSpeedPrecision(plugin.precision)  # type: ignore[arg-type]  # checks the precision itself
