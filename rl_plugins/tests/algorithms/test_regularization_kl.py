"""The KL estimators and the KL in the reward, against plain loops."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KL_ESTIMATORS, KLConfig, kl_in_reward
from rl_plugins.errors import ConfigError
from rl_plugins.tests.algorithms.batches import make_batch
from rl_plugins.tests.algorithms.categorical import CategoricalPolicy
from rl_plugins.tests.algorithms.reference import basics as reference
from rl_plugins.tests.loops import for_each

GRADIENTS = {
    "k1": lambda d: 1.0,
    "k2": lambda d: d,
    "k3": lambda d: 1 - np.exp(-d) if np.exp(-d) + d - 1 < 10 and abs(d) < 20 else 0.0,
}


@for_each("name", ["k1", "k2", "k3"])
@for_each("seed", range(3))
def test_kl_estimators_agree_with_plain_loops(name: str, seed: int) -> None:
    batch = make_batch(seed)
    log_probs = batch.log_probs.clone().requires_grad_()
    values = KL_ESTIMATORS[name](log_probs, batch.ref)
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    values = values.detach()
    for position in np.ndindex(*batch.mask.shape):
        log_prob, ref_log_prob = float(batch.log_probs[position]), float(batch.ref[position])
        assert float(values[position]) == pytest.approx(reference.kl(name, log_prob, ref_log_prob), rel=1e-9, abs=1e-9)
        assert float(gradient[position]) == pytest.approx(GRADIENTS[name](log_prob - ref_log_prob), rel=1e-9, abs=1e-9)
    assert name != "k3" or float(values.max()) == 10.0


def test_only_k2_has_the_expected_gradient_of_the_reverse_kl() -> None:
    """In expectation over a categorical policy: k1's gradient vanishes, k2's is the exact one."""
    policy = CategoricalPolicy(5)

    def expected(name: str) -> torch.Tensor:
        return policy.gradient_of_samples(KL_ESTIMATORS[name](policy.log_probs, policy.ref_log_probs))

    exact = policy.gradient_of_reverse_kl()
    torch.testing.assert_close(expected("k2"), exact)
    torch.testing.assert_close(expected("k1"), torch.zeros_like(exact))


def test_default_kl_in_the_reward_has_the_expected_gradient_of_the_reverse_kl() -> None:
    """The policy follows the mean of `grad log p` times the reward, over all tokens of a categorical policy."""
    policy = CategoricalPolicy(5)
    inputs = {
        "scores_B": torch.zeros(5, dtype=torch.float64),
        "response_mask_BT": torch.ones(5, 1),
        "groups_B": torch.zeros(5, dtype=torch.int64),
        "valid_B": torch.ones(5, dtype=torch.bool),
        "old_log_probs_BT": policy.log_probs.detach()[:, None],
        "ref_log_probs_BT": policy.ref_log_probs[:, None],
    }
    rewards_BT, _, _ = Algorithm(kl=KLConfig(0.3, "reward")).advantages(inputs, kl_coefficient=0.3)
    gradient = policy.gradient_of_samples(rewards_BT[:, 0] * policy.log_probs)
    torch.testing.assert_close(gradient, -0.3 * policy.gradient_of_reverse_kl())


def test_kl_config_has_a_default_estimator_and_allows_only_k1_in_the_reward() -> None:
    assert KLConfig(0.1).estimator_name == "k3" and KLConfig(0.1, "reward").estimator_name == "k1"
    for name in KL_ESTIMATORS.keys() - {"k1"}:
        with pytest.raises(
            ConfigError, match=rf"^estimator={re.escape(name)}: in the reward, only k1 .* use estimator="
        ):
            KLConfig(0.1, "reward", name)


def test_kl_in_reward_agrees_with_plain_loops() -> None:
    batch = make_batch(4)
    for version in (batch, batch.with_garbage()):
        rewards = kl_in_reward(batch.rewards(), version.old, version.ref, version.mask, coefficient=0.3)
        expected = reference.kl_in_reward(
            batch.rewards().numpy(), batch.old.numpy(), batch.ref.numpy(), batch.mask.numpy(), 0.3
        )
        np.testing.assert_allclose(rewards.numpy(), expected, rtol=1e-9, atol=1e-9)
