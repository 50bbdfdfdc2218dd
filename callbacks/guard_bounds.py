"""What `DivergenceGuard` watches, and the options of a recipe; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Bounds:
    """Beyond these a step counts as diverged; None for no bound.

    Attributes:
        kl: largest mean KL to the reference, nats.
        ppo_kl: largest mean KL between the policy that sampled and the one that is updated, nats.
        entropy_min: smallest mean entropy of the policy, nats a token: below it, it has collapsed.
        entropy_max: largest one: above it, it babbles.
        rollout_gap: largest mean difference between the log-probs of trainer and sampler.
        gradient_norm: largest global norm of the gradient of any engine, before clipping.
        reward_drop: how far the moving average of the reward may fall below its best.
        reward_window: about how many steps that average covers.
        finite: loss and gradient norms must be numbers.
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
