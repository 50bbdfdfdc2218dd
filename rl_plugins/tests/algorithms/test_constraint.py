"""The bound on the mean cost: lambda and the advantages under the bound equal a second implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.constraint import (
    CostConstraint,
    LagrangeMultiplier,
    constrained_advantages,
    costs_as_rewards,
)
from rl_plugins.algorithms.filtering import GroupFilter, Resampling
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.errors import ConfigError
from rl_plugins.tests.algorithms.reference import safe_rlhf as reference
from rl_plugins.tests.algorithms.reference.inputs import make_inputs
from rl_plugins.tests.loops import for_each


def costs_of(steps: int, seed: int) -> list[list[float]]:
    """Costs of steps with different numbers of samples; one step has no sample."""
    rng = np.random.default_rng(seed)
    costs = [rng.normal(0.3, 1.0, size=rng.integers(1, 9)).tolist() for _ in range(steps)]
    costs[3] = []
    return costs


def follow(multiplier: LagrangeMultiplier, costs: list[list[float]]) -> list[float]:
    values = []
    for step in costs:
        multiplier.update(math.fsum(step), len(step))
        values.append(multiplier.value)
    return values


@for_each("seed", range(4))
@for_each("window", [1, 3, 100])
@for_each(("threshold", "maximum"), [(0.0, 5.0), (0.5, 5.0), (-0.5, 1.5)])
def test_multiplier_agrees_with_the_second_implementation(
    threshold: float, maximum: float, window: int, seed: int
) -> None:
    costs = costs_of(20, seed)
    constraint = CostConstraint("cost", threshold, 1.2, 0.3, maximum, window)
    expected = reference.multipliers(costs, threshold=threshold, initial=1.2, rate=0.3, maximum=maximum, window=window)
    np.testing.assert_allclose(follow(constraint.multiplier(), costs), expected, rtol=1e-12)
    assert threshold >= 0 or math.isclose(max(expected), maximum), "lambda did not reach its bound"


def test_multiplier_rises_above_the_threshold_and_falls_below() -> None:
    multiplier = CostConstraint(threshold=0.5, window=1).multiplier()
    assert multiplier.value == 1 and math.isnan(multiplier.mean_cost)
    rising = follow(multiplier, [[1.0, 0.6]] * 3)
    falling = follow(multiplier, [[0.1, 0.0]] * 3)
    assert 1 < rising[0] < rising[1] < rising[2] > falling[0] > falling[1] > falling[2] > 0
    assert multiplier.mean_cost == 0.05


def test_multiplier_continues_from_a_state_with_the_same_bits() -> None:
    costs, constraint = costs_of(12, 0), CostConstraint("cost", lambda_lr=0.4, window=5)
    whole, first = constraint.multiplier(), constraint.multiplier()
    expected = follow(whole, costs)
    follow(first, costs[:6])
    second = constraint.multiplier()
    second.load_state_dict(first.state_dict())
    assert follow(second, costs[6:]) == expected[6:]


def test_multiplier_with_a_state_keeps_the_configured_bound_and_window() -> None:
    multiplier = CostConstraint(lambda_lr=1.0, lambda_max=50.0, window=4).multiplier()
    follow(multiplier, [[0.5]] * 4)
    lower = CostConstraint(lambda_max=1.5, window=1).multiplier()
    lower.load_state_dict(multiplier.state_dict())
    assert multiplier.value > 1.5 and lower.value == pytest.approx(1.5)
    lower.update(-3.0, 1)
    assert lower.mean_cost == -3.0


@for_each("seed", range(4))
@for_each("beta", [0.0, 0.1])
@for_each("multiplier", [1e-6, 0.7, 4.0])
def test_constrained_advantages_agree_with_the_second_implementation(multiplier: float, beta: float, seed: int) -> None:
    inputs, others = make_inputs(seed, extremes=False), make_inputs(seed + 100, extremes=False)
    options: dict[str, Any] = {"gamma": 0.95, "lam": 0.8}
    algorithm = Algorithm(
        advantage="gae",
        advantage_options={**options, "normalize": False},
        kl=KLConfig(beta, "reward", "k1"),
        constraint=CostConstraint("cost"),
    )
    assert {"costs_B", "values_BT", "cost_values_BT"} <= algorithm.needs
    names = (
        "scores_B", "response_mask_BT", "response_lengths_B", "groups_B", "valid_B", "values_BT", "old_log_probs_BT",
        "ref_log_probs_BT", "component_rewards_BK",
    )  # fmt: skip
    given = {name: torch.from_numpy(inputs[name]) for name in names}
    given |= {"costs_B": torch.from_numpy(others["scores_B"]), "cost_values_BT": torch.from_numpy(others["values_BT"])}
    _, advantages_BT, returns_BT = algorithm.advantages(given, kl_coefficient=beta)
    _, cost_advantages_BT, cost_returns_BT = algorithm.advantages(costs_as_rewards(given), kl_coefficient=-beta)
    combined_BT = constrained_advantages(
        advantages_BT=advantages_BT, cost_advantages_BT=cost_advantages_BT, multiplier=multiplier
    )
    expected = reference.advantages_and_returns(
        scores_B=inputs["scores_B"],
        costs_B=others["scores_B"],
        kl_BT=inputs["old_log_probs_BT"] - inputs["ref_log_probs_BT"],
        values_BT=inputs["values_BT"],
        cost_values_BT=others["values_BT"],
        mask_BT=inputs["response_mask_BT"],
        valid_B=inputs["valid_B"],
        beta=beta,
        multiplier=multiplier,
        **options,
    )
    for actual, wanted in zip((combined_BT, returns_BT, cost_returns_BT), expected, strict=True):
        np.testing.assert_allclose(actual.numpy(), wanted, rtol=1e-9, atol=1e-9)


def test_needs_of_a_constraint_have_values_of_costs_only_beside_values() -> None:
    constraint = CostConstraint("cost")
    assert Algorithm(constraint=constraint).needs == {"costs_B"}
    assert Algorithm(advantage="gae", constraint=constraint).needs == {"costs_B", "values_BT", "cost_values_BT"}


@for_each(
    ("options", "message"),
    [
        ({"threshold": math.nan}, r"^threshold=nan: must be a finite number"),
        ({"lambda_init": 0}, r"^lambda_init=0: must be above 0"),
        ({"lambda_lr": -0.1}, r"^lambda_lr=-0.1: must be above 0"),
        ({"lambda_max": 0.0}, r"^lambda_max=0.0: must be above 0"),
        ({"window": 0}, r"^window=0: must be at least 1"),
        ({"lambda_init": 9.0}, r"^lambda_init=9: must be at most lambda_max=5: change one of them"),
    ],
)
def test_cost_constraint_refuses_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostConstraint(**options)


@for_each(
    ("options", "message"),
    [
        ({"group_filter": GroupFilter()}, r"^constraint bounds .* group_filter chooses samples by their rewards"),
        ({"resampling": Resampling()}, r"^constraint bounds .* resampling chooses samples by their rewards"),
        ({"advantage": "remax"}, r"^constraint needs an advantage of the costs.* needs baseline_rewards_B"),
        ({"advantage": "prime"}, r"^constraint needs an advantage of the costs.* needs process_rewards_BT"),
        ({"constraint": {"threshold": 0.0}}, r"^constraint=.*: must be of the kind CostConstraint or null"),
    ],
)
def test_algorithm_refuses_a_constraint_beside_options_of_rewards_only(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Algorithm(**{"constraint": CostConstraint("cost"), **options})
