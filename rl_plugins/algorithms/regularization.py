"""Regularization of the policy: the KL to the reference, and the coefficients of the KL and of the entropy bonus.

`KL(policy || reference)` is estimated from the log-probabilities of sampled tokens, and the best estimator depends on
the placement of the KL term. In the loss, only `k2` and the straight-through forms (names that end in `+`) have the
gradient of the reverse KL on on-policy samples. `k3` has the gradient of the forward KL, which is the same near the
reference, and the expected gradient of `k1` is zero.

A KL in the reward has no gradient of its own: the policy follows the mean of `grad log p` times the estimate. With `k1`
this mean is the gradient of the reverse KL. With `k3` the mean is the gradient of the reverse KL minus the gradient of
the forward KL, which is zero to first order near the reference, and `k2` has no term of first order either. So only
`k1` is allowed in the reward. A coefficient is fixed, or adapted to a measure of each RL step.

Source: http://joschu.net/blog/kl-approx.html; for the gradients, https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from rl_plugins.config.settings import ABOVE_0, ABOVE_0_OR_NULL, NOT_NEGATIVE, Settings
from rl_plugins.errors import ConfigError

KLEstimator = Callable[[Tensor, Tensor], Tensor]


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


def absolute(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """`|log p - log p_ref|`: a distance rather than an estimate of the KL. Any shape."""
    return (log_probs - ref_log_probs).abs()


def with_gradient_of_k2(estimator: KLEstimator) -> KLEstimator:
    """Return the straight-through form of an estimator: its value, with the gradient of `k2`."""

    def straight_through(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        differentiated = k2(log_probs, ref_log_probs)
        return differentiated - differentiated.detach() + estimator(log_probs, ref_log_probs).detach()

    straight_through.__doc__ = f"`k2 - sg(k2) + sg({estimator.__name__})`, with the stop-gradient sg. Any shape."
    return straight_through


KL_ESTIMATORS: dict[str, KLEstimator] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": with_gradient_of_k2(k1),
    "k3+": with_gradient_of_k2(k3),
    "abs+": with_gradient_of_k2(absolute),
}


def kl_in_reward(
    token_level_scores_BT: Tensor,
    log_probs_BT: Tensor,
    ref_log_probs_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    coefficient: float,
) -> Tensor:
    """Compute the token-level rewards `score - coefficient * (log p - log p_ref)` on valid tokens, [B, T]."""
    kl_BT = k1(log_probs_BT, ref_log_probs_BT)
    return token_level_scores_BT - coefficient * torch.where(response_mask_BT.bool(), kl_BT, 0)


# Coefficients -------------------------------------------------------------------------------------------------------


class Coefficient:
    """Weight of a term of the loss or of the reward: fixed, or adapted to a measure of each RL step.

    The state is saved in checkpoints. A fixed weight belongs to the configuration and has no state.

    Args:
        config: weight at the start, and a target for an adapted weight.

    Attributes:
        coefficient: weight of the term.
    """

    def __init__(self, config: KLConfig | EntropyConfig) -> None:
        self._config, self.coefficient = config, config.coefficient

    def update(self, measured: float, num_sequences: int) -> None:
        """Adapt the weight to the mean measure of one RL step with `num_sequences` sequences."""
        if self._config.target is not None:
            self.coefficient = self._config.adapted(self.coefficient, measured, num_sequences)

    def state_dict(self) -> dict[str, float]:
        """Return the adapted weight."""
        return {} if self._config.target is None else {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore an adapted weight, within the configured range; a fixed weight stays as configured."""
        if self._config.target is not None:
            self.coefficient = self._config.bounded(state.get("coefficient", self.coefficient))


@dataclass(frozen=True)
class KLConfig(Settings):
    """KL term, which keeps the policy near the reference.

    Attributes:
        coefficient: weight of the KL term; 0 needs no reference model.
        placement: `loss` (added to the policy loss) or `reward` (subtracted from each token's reward).
        estimator: name in `KL_ESTIMATORS`; None is `k3` in the loss, and `k1` in the reward, where no other is allowed.
        target: KL towards which the coefficient is adapted, in nats; None keeps the coefficient fixed.
        horizon: number of sequences; the larger, the slower the coefficient adapts.
    """

    coefficient: Annotated[float, NOT_NEGATIVE] = 0.0
    placement: Literal["loss", "reward"] = "loss"
    estimator: str | None = None
    target: Annotated[float | None, ABOVE_0_OR_NULL] = None
    horizon: Annotated[float, ABOVE_0] = 10_000.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a value is out of its range, the estimator does not hold the policy from inside the reward, or
                `target` would adapt a coefficient of 0.
        """
        super().__post_init__()
        if self.placement == "reward" and self.estimator_name != "k1":
            raise ConfigError(
                f"estimator={self.estimator}: in the reward, only k1 has the gradient of the KL, and the policy drifts "
                "from the reference with every other estimator: use estimator=null or k1, or placement=loss"
            )
        if self.target is not None and not self.coefficient:
            raise ConfigError(
                f"target={self.target} multiplies the coefficient, and coefficient=0 stays 0: set coefficient above 0"
            )

    @property
    def estimator_name(self) -> str:
        """Name of the estimator, also if `estimator` is None."""
        return self.estimator if self.estimator is not None else "k1" if self.placement == "reward" else "k3"

    def adapted(self, coefficient: float, measured: float, num_sequences: int) -> float:
        """Return `coefficient (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)`, with n sequences in the step.

        One step changes the weight by at most 20% of n / horizon.

        Raises:
            ConfigError: n is 5 `horizon` or more, so one step could make the coefficient 0 or negative.

        Source: https://arxiv.org/abs/1909.08593, section 2.2.
        """
        assert self.target is not None
        if num_sequences >= 5 * self.horizon:
            raise ConfigError(
                f"horizon={self.horizon:g}: one step of {num_sequences} sequences could make the coefficient of "
                f"the KL 0 or negative: set horizon above {num_sequences / 5:g}"
            )
        error = max(-0.2, min(0.2, measured / self.target - 1))
        return coefficient * (1 + error * num_sequences / self.horizon)

    def bounded(self, coefficient: float) -> float:
        """Return the coefficient, which has no bounds."""
        return coefficient


@dataclass(frozen=True)
class EntropyConfig(Settings):
    """Bonus for the policy's entropy.

    Attributes:
        coefficient: weight of the bonus in the loss.
        target: entropy towards which the weight is adapted, in nats per token; None keeps the weight fixed.
        rate: step of the adaptation.
        minimum: smallest adapted weight.
        maximum: largest adapted weight.
    """

    coefficient: float = 0.0
    target: float | None = None
    rate: Annotated[float, NOT_NEGATIVE] = 0.005
    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a number is out of its range, or an adapted weight begins outside of its bounds.
        """
        super().__post_init__()
        if self.target is not None and not self.minimum <= self.coefficient <= self.maximum:
            raise ConfigError(
                f"coefficient={self.coefficient}: must be from minimum={self.minimum} to maximum={self.maximum}"
            )

    @property
    def active(self) -> bool:
        """True if the bonus has a weight at the start or can get one later."""
        return self.coefficient != 0 or self.target is not None

    def adapted(self, coefficient: float, measured: float, num_sequences: int) -> float:
        """Return `coefficient +- rate`, within `minimum` and `maximum`; exactly on target the weight stays.

        The paper also removes the bonus from the loss while the entropy is above its target; here the weight falls step
        by step to `minimum`.

        Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, adaptive entropy control.
        """
        assert self.target is not None
        direction = (measured < self.target) - (measured > self.target)
        return self.bounded(coefficient + direction * self.rate)

    def bounded(self, coefficient: float) -> float:
        """Return the coefficient within `minimum` and `maximum`."""
        return max(self.minimum, min(self.maximum, coefficient))
