"""The KL estimators and the KL in the reward, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_plugins.algorithms.regularization import KL_ESTIMATORS, kl_in_reward
from rl_plugins.tests.algorithms.batches import make_batch
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
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64).requires_grad_()
    reference_log_probs = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    weights = log_probs.exp()
    (exact,) = torch.autograd.grad((weights * (log_probs - reference_log_probs)).sum(), logits, retain_graph=True)

    def expected(name: str) -> torch.Tensor:
        values = KL_ESTIMATORS[name](log_probs, reference_log_probs)
        return torch.autograd.grad((weights.detach() * values).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(expected("k2"), exact)
    torch.testing.assert_close(expected("k1"), torch.zeros_like(exact))


@for_each("name", ["k1", "k2", "k3"])
def test_kl_in_reward_agrees_with_plain_loops(name: str) -> None:
    batch = make_batch(4)
    for version in (batch, batch.with_garbage()):
        rewards = kl_in_reward(batch.rewards(), version.old, version.ref, version.mask, coefficient=0.3, estimator=name)
        expected = reference.kl_in_reward(
            batch.rewards().numpy(), batch.old.numpy(), batch.ref.numpy(), batch.mask.numpy(), 0.3, name
        )
        np.testing.assert_allclose(rewards.numpy(), expected, rtol=1e-9, atol=1e-9)
