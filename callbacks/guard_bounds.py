"""Bounds of `DivergenceGuard`. The options of a recipe use the class too, so this module imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Bounds:
    """Bounds on the metrics of a step; None for no bound. A step beyond a bound counts as diverged.

    Attributes:
        kl: largest mean KL divergence from the reference model, in nats.
        ppo_kl: largest mean KL divergence between the policy that sampled and the updated policy, in nats.
        entropy_min: smallest mean entropy of the policy, in nats per token. A policy below this bound has collapsed.
        entropy_max: largest mean entropy of the policy, in nats per token. A policy above this bound writes noise.
        rollout_gap: largest mean difference between the log-probs of the trainer and the rollout engine.
        gradient_norm: largest global gradient norm of any model, before clipping.
        reward_drop: largest distance of the reward's moving average below its best value.
        reward_window: approximate number of steps in the moving average.
        finite: True to require a finite loss and finite gradient norms.
    """

    kl: float | None = None
    ppo_kl: float | None = None
    entropy_min: float | None = None
    entropy_max: float | None = None
    rollout_gap: float | None = None
    gradient_norm: float | None = None
    reward_drop: float | None = None
    reward_window: int = 20
    finite: bool = True
