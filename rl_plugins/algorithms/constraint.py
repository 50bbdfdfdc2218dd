"""Bound on the mean cost of the policy's samples, kept by a Lagrange multiplier (Safe RLHF).

The policy maximizes `mean reward - lambda (mean cost - threshold)`, and lambda minimizes the same number. So lambda
rises while samples cost too much, and falls while the bound leaves room for more reward.

Before each update of the policy: `log lambda += lambda_lr lambda (mean cost - threshold)`, a step along the gradient by
`log lambda`. Costs have advantages of their own, by the same estimator, from the values of a second critic. The policy
learns from `(A - lambda A_cost) / (1 + lambda)`. A KL penalty in the reward is subtracted from the rewards and added to
the costs. If advantages are not scaled or normalized, the weight of the penalty in the sum does not depend on lambda.

Source: https://arxiv.org/abs/2310.12773, equations 30 and 31; the window and the bound on lambda, from its code,
https://github.com/PKU-Alignment/safe-rlhf, `safe_rlhf/algorithms/ppo_lag`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from rl_plugins.algorithms.inputs import OF_REWARDS_ONLY
from rl_plugins.config.settings import ABOVE_0, AT_LEAST_1, Settings
from rl_plugins.errors import ConfigError


@dataclass(frozen=True)
class CostConstraint(Settings):
    """Bound on the mean cost, and the settings of its multiplier lambda.

    The cost of a sample is a number of the reward function, the score of a cost model, or the sum of both.

    Attributes:
        cost: name of the number, returned by the reward function beside the score, to be the cost; None if only a cost
            model gives costs.
        threshold: bound on the mean cost. The cost model of the paper is above 0 for a harmful response.
        lambda_init: lambda before the first step. 1 gives reward and cost the same weight.
        lambda_lr: step size of `log lambda`.
        lambda_max: largest lambda.
        window: number of newest steps whose samples give the mean cost.
    """

    cost: str | None = None
    threshold: float = 0.0
    lambda_init: Annotated[float, ABOVE_0] = 1.0
    lambda_lr: Annotated[float, ABOVE_0] = 0.1
    lambda_max: Annotated[float, ABOVE_0] = 5.0
    window: Annotated[int, AT_LEAST_1] = 8

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a number is out of its range, or lambda begins above its bound.
        """
        super().__post_init__()
        if self.lambda_init > self.lambda_max:
            raise ConfigError(
                f"lambda_init={self.lambda_init:g}: must be at most lambda_max={self.lambda_max:g}: change one of them"
            )

    def multiplier(self) -> LagrangeMultiplier:
        """Build the multiplier of a run."""
        return LagrangeMultiplier(self)

    def check_fits(self, advantage_inputs: Collection[str], choices: Mapping[str, object]) -> None:
        """Check the options of the algorithm beside the constraint.

        Args:
            advantage_inputs: names of the inputs of the advantage.
            choices: options with a choice of samples by their rewards; None makes no choice.

        Raises:
            ConfigError: the advantage cannot be computed for costs, or an option chooses samples.
        """
        for option, choice in choices.items():
            if choice is not None:
                raise ConfigError(
                    f"constraint bounds the mean cost of all samples, and {option} chooses samples by their rewards: "
                    "leave one of the two out"
                )
        if of_rewards := OF_REWARDS_ONLY.intersection(advantage_inputs):
            raise ConfigError(
                f"constraint needs an advantage of the costs, too, and this advantage needs {min(of_rewards)}, an "
                "input of rewards only: use gae, grpo or another advantage of rewards and values"
            )


class LagrangeMultiplier:
    """Multiplier lambda of a constraint, with the costs of the newest steps.

    Args:
        constraint: settings of the multiplier.
    """

    def __init__(self, constraint: CostConstraint) -> None:
        self._constraint = constraint
        self._log_value = math.log(constraint.lambda_init)
        # Sum of the costs, and number of the samples, of each step in the window.
        self._steps: list[tuple[float, float]] = []

    @property
    def value(self) -> float:
        """Lambda, above 0."""
        return math.exp(self._log_value)

    @property
    def mean_cost(self) -> float:
        """Mean cost of all samples in the window; NaN without a sample."""
        samples = sum(count for _, count in self._steps)
        return sum(costs for costs, _ in self._steps) / samples if samples else math.nan

    def update(self, sum_of_costs: float, num_samples: float) -> None:
        """Take a step of gradient ascent on `lambda (mean cost - threshold)` over `log lambda`.

        `log lambda += lr lambda (mean cost - threshold)`, and lambda stays at most `lambda_max`.

        Args:
            sum_of_costs: sum of the costs of a step's samples on all ranks.
            num_samples: number of these samples; without samples in the window lambda stays.
        """
        constraint = self._constraint
        self._steps = [*self._steps, (sum_of_costs, num_samples)][-constraint.window :]
        excess = self.mean_cost - constraint.threshold
        if not math.isnan(excess):
            raised = self._log_value + constraint.lambda_lr * self.value * excess
            self._log_value = min(raised, math.log(constraint.lambda_max))

    def state_dict(self) -> dict[str, Any]:
        """Return `log lambda` and the costs of the window."""
        return {"log_value": self._log_value, "steps": [list(step) for step in self._steps]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, with the configured bound on lambda and the configured window."""
        self._log_value = min(state["log_value"], math.log(self._constraint.lambda_max))
        steps = [(float(costs), float(count)) for costs, count in state["steps"]]
        self._steps = steps[-self._constraint.window :]


def costs_as_rewards(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs for the advantages of the costs: costs in place of scores, and values of the cost critic.

    Args:
        inputs: inputs of an advantage estimator by name, with `costs_B`, and `cost_values_BT` if there are values.
    """
    of_costs = {"scores_B": inputs["costs_B"], "values_BT": inputs.get("cost_values_BT")}
    return {**inputs, **dict.fromkeys(OF_REWARDS_ONLY), **of_costs}


def constrained_advantages(*, advantages_BT: Tensor, cost_advantages_BT: Tensor, multiplier: float) -> Tensor:
    """Compute the advantages of the reward under the constraint, `(A - lambda A_cost) / (1 + lambda)`, [B, T].

    The divisor keeps the scale of the advantages, however large lambda grows.

    Args:
        advantages_BT: advantages of the rewards.
        multiplier: lambda.

    Source: https://arxiv.org/abs/2310.12773, equation 30.
    """
    return (advantages_BT - multiplier * cost_advantages_BT) / (1 + multiplier)
