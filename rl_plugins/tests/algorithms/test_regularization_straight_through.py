"""`abs` and the straight-through forms: the value of the base, the gradient of k2."""

from __future__ import annotations

import torch

from rl_plugins.algorithms.regularization import KL_ESTIMATORS
from rl_plugins.tests.algorithms.categorical import CategoricalPolicy
from rl_plugins.tests.loops import for_each

LOG_PROBS = torch.tensor([-1.0, -2.0, -0.5, -30.0, -0.1, -2.0], dtype=torch.float64)
REFERENCE = torch.tensor([-2.0, -0.5, -0.5, -1.0, -40.0, -2.3], dtype=torch.float64)


def value_and_gradient(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs = LOG_PROBS.clone().requires_grad_()
    values = KL_ESTIMATORS[name](log_probs, REFERENCE)
    return values.detach(), torch.autograd.grad(values.sum(), log_probs)[0]


def test_abs_kl_estimator_matches_a_computation_by_hand() -> None:
    values, gradient = value_and_gradient("abs")
    torch.testing.assert_close(values, torch.tensor([1.0, 1.5, 0.0, 29.0, 39.9, 0.3], dtype=torch.float64))
    assert gradient.tolist() == [1, -1, 0, -1, 1, 1]


@for_each("base", ["k1", "k3", "abs"])
def test_straight_through_kl_has_the_value_of_the_base_and_the_gradient_of_k2(base: str) -> None:
    values, gradient = value_and_gradient(f"{base}+")
    assert torch.equal(values, value_and_gradient(base)[0])
    assert torch.equal(gradient, LOG_PROBS - REFERENCE)


@for_each("name", ["k1+", "k2", "k3+", "abs+"])
def test_straight_through_kl_has_the_expected_gradient_of_the_reverse_kl(name: str) -> None:
    policy = CategoricalPolicy(6)
    values = KL_ESTIMATORS[name](policy.log_probs, policy.ref_log_probs)
    torch.testing.assert_close(policy.gradient_of_samples(values), policy.gradient_of_reverse_kl())
