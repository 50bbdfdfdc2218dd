"""PPO's clipped loss against plain loops, with its gradient, and with garbage where the mask is 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.policy_losses import ppo_clip
from rl_plugins.tests.algorithms.batches import Batch, make_batch
from rl_plugins.tests.algorithms.reference import basics as reference
from rl_plugins.tests.loops import for_each

CLIPS = [
    (0.2, 0.2, 3.0),
    (0.2, 0.28, 3.0),
    (0.3, 0.1, 1.5),
    (0.2, 0.2, None),
    (1.0, 5.0, 10.0),
    (0.0, 0.0, 2.0),
]


def loss_metrics_and_gradient(
    batch: Batch, low: float, high: float, dual: float | None
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, metrics = ppo_clip(
        log_probs_BT=log_probs,
        old_log_probs_BT=batch.old,
        advantages_BT=batch.advantages,
        response_mask_BT=batch.mask,
        clip_low=low,
        clip_high=high,
        dual_clip=dual,
    )
    (gradient,) = torch.autograd.grad((loss * batch.mask).sum(), log_probs)
    return loss.detach(), metrics, gradient


@for_each(("low", "high", "dual"), CLIPS)
@for_each("seed", range(4))
def test_ppo_clip_loss_gradient_and_metrics_agree_with_plain_loops(
    seed: int, low: float, high: float, dual: float | None
) -> None:
    batch = make_batch(seed)
    loss, metrics, gradient = loss_metrics_and_gradient(batch, low, high, dual)
    expected = reference.ppo_clip(*batch.ppo_arrays(), low, high, dual)
    mask = batch.mask.numpy()
    np.testing.assert_allclose(loss.numpy() * mask, expected["loss"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(gradient.numpy(), expected["gradient"], rtol=1e-9, atol=1e-9)
    for name, values in metrics.items():
        np.testing.assert_allclose(values.numpy() * mask, expected[name], rtol=1e-9, atol=1e-9, err_msg=name)
    assert expected["clip_fraction"].any()
    assert dual is None or expected["dual_clip_fraction"].any()
    assert set(metrics) == {"clip_fraction", "ppo_kl"} | ({"dual_clip_fraction"} if dual is not None else set())


def test_ppo_clip_ignores_masked_entries() -> None:
    batch = make_batch(1)
    loss, metrics, gradient = loss_metrics_and_gradient(batch, 0.2, 0.28, 3.0)
    for garbage in (torch.nan, torch.inf, -torch.inf):
        dirty_loss, dirty_metrics, dirty_gradient = loss_metrics_and_gradient(
            batch.with_garbage(garbage), 0.2, 0.28, 3.0
        )
        assert torch.equal(dirty_gradient, gradient)
        assert torch.equal(dirty_loss * batch.mask, loss * batch.mask)
        for name, values in metrics.items():
            assert torch.equal(dirty_metrics[name] * batch.mask, values * batch.mask)


def test_ppo_clip_at_ratio_1_has_the_gradient_of_reinforce() -> None:
    """Ratio 1: the clip's two branches tie, and the gradient must not be halved."""
    batch = make_batch(2)
    batch.old = batch.log_probs.clone()
    _, _, gradient = loss_metrics_and_gradient(batch, 0.2, 0.2, 3.0)
    torch.testing.assert_close(gradient, -batch.advantages * batch.mask, rtol=1e-12, atol=0)


@for_each("dual_clip", [1.0, 0.5])
def test_ppo_clip_refuses_a_dual_clip_of_at_most_1(dual_clip: float) -> None:
    with pytest.raises(ValueError, match=f"dual_clip={dual_clip}: must be above 1"):
        loss_metrics_and_gradient(make_batch(0), 0.2, 0.2, dual_clip)
