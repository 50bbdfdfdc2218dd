"""Coefficients of the KL term and of the entropy bonus: fixed, or adapted to a measure of each RL step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rl_plugins.algorithms.checks import check_not_negative
from rl_plugins.errors import ConfigError


class Coefficient(Protocol):
    """Weight of a term of the loss or of the reward; the state is saved in checkpoints."""

    coefficient: float

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state from a checkpoint."""


class KLController(Coefficient, Protocol):
    """Weight of the KL term, adapted to the measured KL."""

    def update(self, measured_kl: float, num_sequences: int, /) -> None:
        """Adapt the weight to the mean KL of one RL step."""


class EntropyController(Coefficient, Protocol):
    """Weight of the entropy bonus, adapted to the measured entropy."""

    def update(self, measured_entropy: float, /) -> None:
        """Adapt the weight to the mean entropy of one RL step, in nats per token."""


@dataclass
class FixedCoefficient:
    """A constant weight."""

    coefficient: float

    def update(self, measured: float, num_sequences: int = 0) -> None:
        """Leave the weight unchanged."""

    def state_dict(self) -> dict[str, float]:
        """Return the weight."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the configured weight: a fixed weight belongs to the configuration."""


@dataclass
class AdaptiveKL:
    """Weight that rises if the KL is above its target and falls if it is below.

    One step changes the weight by at most 20% of n / horizon, with n sequences in the step.

    Attributes:
        coefficient: weight at the start, then the adapted weight.
        target: target KL.
        horizon: number of sequences; the larger, the slower the weight changes.

    Source: https://arxiv.org/abs/1909.08593, section 2.2.
    """

    coefficient: float
    target: float = 0.1
    horizon: float = 10_000.0

    def update(self, measured_kl: float, num_sequences: int) -> None:
        """Compute `coefficient *= 1 + clip(KL / target - 1, -0.2, 0.2) n / horizon`."""
        error = max(-0.2, min(0.2, measured_kl / self.target - 1))
        self.coefficient *= 1 + error * num_sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the adapted weight."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the adapted weight."""
        self.coefficient = state["coefficient"]


@dataclass
class AdaptiveEntropy:
    """Weight that rises by `rate` if the entropy is below its target, and falls by `rate` if it is above.

    The paper also removes the bonus from the loss while the entropy is above its target; here the weight falls step by
    step to `minimum`.

    Attributes:
        coefficient: weight at the start, then the adapted weight.
        target: target entropy, in nats per token.
        rate: step of the weight.
        minimum: smallest adapted weight.
        maximum: largest adapted weight.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, adaptive entropy control.
    """

    coefficient: float
    target: float
    rate: float = 0.005
    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: `rate` is negative, or `coefficient` is outside of `minimum` and `maximum`.
        """
        check_not_negative(rate=self.rate)
        if not self.minimum <= self.coefficient <= self.maximum:
            raise ConfigError(
                f"coefficient={self.coefficient}: must be from minimum={self.minimum} to maximum={self.maximum}"
            )

    def update(self, measured_entropy: float) -> None:
        """Set `coefficient +- rate`, within `minimum` and `maximum`; exactly on target the weight stays."""
        direction = (measured_entropy < self.target) - (measured_entropy > self.target)
        self.coefficient = max(self.minimum, min(self.maximum, self.coefficient + direction * self.rate))

    def state_dict(self) -> dict[str, float]:
        """Return the adapted weight."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the adapted weight, within the configured range."""
        self.coefficient = max(self.minimum, min(self.maximum, state["coefficient"]))
