"""Settings of the optimizer that a stage makes when the policy does not bring its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up.

    Attributes:
        lr: learning rate.
        betas: decay of the moments.
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
        """Share of `lr` at a step of the stage."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps == 0:
            return 1.0
        progress = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return 1.0 - (1.0 - self.lr_end) * progress
