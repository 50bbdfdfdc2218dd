"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, and the controllers of its weight.

Source: http://joschu.net/blog/kl-approx.html. As a loss only `k2` (and the straight-through forms) has the gradient
of the reverse KL on on-policy samples; `k1` has expectation zero. In the reward any of them is sound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`log p - log p_ref`: unbiased, high variance, may be negative. Any shape."""
    return log_probs - ref_log_probs


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`(log p - log p_ref)^2 / 2`: biased, low variance, the gradient of the reverse KL. Any shape."""
    return (log_probs - ref_log_probs).square() / 2


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`e^u - u - 1` with `u = log p_ref - log p`: unbiased, never negative; bounded to [-10, 10]. Any shape."""
    u = (ref_log_probs - log_probs).clamp(-20, 20)
    return (u.exp() - u - 1).clamp(-10, 10)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


class KLController(Protocol):
    """Gives the weight of the KL term and learns from the KL that was measured; its state is checkpointed."""

    coefficient: float

    def update(self, measured_kl: float, num_sequences: int) -> None:
        """Take in the mean KL of one RL step."""

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore it."""


@dataclass
class FixedKL:
    """A constant weight."""

    coefficient: float

    def update(self, measured_kl: float, num_sequences: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        """The weight itself."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed weight belongs to the configuration: keep what was configured."""


@dataclass
class AdaptiveKL:
    """Raises the weight when the KL is above its target and lowers it below, by at most 20% of n / horizon a step.

    Source: https://arxiv.org/abs/1909.08593, section 2.2.
    """

    coefficient: float
    target: float = 0.1
    horizon: float = 10_000.0

    def update(self, measured_kl: float, num_sequences: int) -> None:
        """`coefficient *= 1 + clip(KL / target - 1, -0.2, 0.2) n / horizon`."""
        error = max(-0.2, min(0.2, measured_kl / self.target - 1))
        self.coefficient *= 1 + error * num_sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        """The weight that was reached."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the weight that was reached."""
        self.coefficient = state["coefficient"]


def kl_in_reward(
    token_level_scores_BT: Tensor,
    log_probs_BT: Tensor,
    ref_log_probs_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    coefficient: float,
    estimator: str = "k1",
) -> Tensor:
    """Token-level rewards `score - coefficient * kl` on valid tokens, [B, T]."""
    kl_BT = KL_ESTIMATORS[estimator](log_probs_BT, ref_log_probs_BT)
    return token_level_scores_BT - coefficient * torch.where(response_mask_BT.bool(), kl_BT, 0)
