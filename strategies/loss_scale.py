"""Scale of the loss for passes in float16, whose smallest gradients would be 0 without a scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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

    In a step with the scale 1, a gradient that is not finite is no fault of the scale, and its norm counts as in other
    precisions.

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

    def known_norm(self, norm: float, smallest: float = _SMALLEST) -> float | None:
        """Return the norm for metrics, before `update`; None after an overflow that a smaller scale may prevent.

        Args:
            norm: global norm of the gradients.
            smallest: smallest scale.
        """
        return norm if math.isfinite(norm) or self.value <= smallest else None


class EngineScale:
    """Scale of the loss that an engine of DeepSpeed keeps by itself.

    At the smallest scale the engine trains on, as with `LossScale`; by itself, DeepSpeed ends the run.

    Args:
        engine: engine of a trained model, in any precision.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._norm: float | None = None
        if engine.fp16_enabled():
            engine.optimizer.loss_scaler.raise_error_at_min_scale = False

    @property
    def scale(self) -> LossScale | None:
        """The scale of the next loss; None without float16."""
        if not self._engine.fp16_enabled():
            return None
        return LossScale(float(self._engine.optimizer.loss_scale), skipped=self._engine.skipped_steps)

    @property
    def norm(self) -> float | None:
        """The global norm of the last step's gradient before clipping, for metrics; see `LossScale.known_norm`."""
        return self._norm if self._engine.fp16_enabled() else self._norm_of_engine()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Let the engine take an optimizer step in this context, and set the scale of the next step afterwards.

        In float16, DeepSpeed sets the next scale before it divides the gradients by the scale. In a step that doubles
        the scale, the gradients would be divided by two times the scale of the loss.
        """
        scale = self.scale
        if scale is None:
            yield
            return
        optimizer = self._engine.optimizer
        overflows: list[bool] = []
        # The attribute hides the method, which DeepSpeed calls once in a step. Other calls of `step` take no step.
        optimizer._update_scale = overflows.append
        try:
            yield
        finally:
            del optimizer._update_scale
        norm = self._norm_of_engine()
        # A scale that does not change cannot become smaller.
        smallest = getattr(optimizer.loss_scaler, "min_scale", scale.value)
        self._norm = None if norm is None else scale.known_norm(norm, smallest)
        for overflow in overflows:
            optimizer._update_scale(overflow)

    def _norm_of_engine(self) -> float | None:
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)
