"""No policy loss depends on masked entries or on the split of samples over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_plugins.algorithms.aggregation import AGGREGATIONS, GlobalCounts, aggregate, local_counts
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES
from rl_plugins.tests.algorithms.batches import Batch, make_batch
from rl_plugins.tests.algorithms.policy_loss_cases import loss_of
from rl_plugins.tests.loops import for_each

# Sizes of the micro-batches of each rank.
SPLITS = [[[8, 8]], [[4, 4, 4, 4]], [[1] * 16], [[8], [8]], [[3, 5], [4, 4]]]


def loss_gradient_and_metrics(name: str, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, metrics = loss_of(name, batch, log_probs)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.detach(), gradient, metrics


def in_float32(batch: Batch) -> Batch:
    single = {name: value.float() for name, value in vars(batch).items() if value.dtype == torch.float64}
    return Batch(**{**vars(batch), **single})


@for_each("name", POLICY_LOSSES)
@for_each("garbage", [torch.nan, torch.inf, -torch.inf])
def test_policy_losses_ignore_masked_entries(name: str, garbage: float) -> None:
    for batch in (make_batch(1), in_float32(make_batch(1))):
        loss, gradient, metrics = loss_gradient_and_metrics(name, batch)
        dirty_loss, dirty_gradient, dirty_metrics = loss_gradient_and_metrics(name, batch.with_garbage(garbage))
        assert torch.equal(dirty_loss, loss) and torch.equal(dirty_gradient, gradient)
        assert not gradient[batch.mask == 0].any()
        assert gradient.isfinite().all() and loss.isfinite().all()
        assert metrics.keys() == dirty_metrics.keys() and "ppo_kl" in metrics
        for metric, values in metrics.items():
            assert torch.equal(dirty_metrics[metric], values)
            assert values.shape == batch.mask.shape and not values.requires_grad


@for_each("name", POLICY_LOSSES)
def test_policy_losses_stay_finite_for_extreme_log_ratios(name: str) -> None:
    """A token with a probability near 0 under one of the policies must not end the run."""
    batch = in_float32(make_batch(2))
    batch.old[:, 0::2] -= 200
    batch.log_probs[:, 1::2] -= 200
    loss, gradient, _ = loss_gradient_and_metrics(name, batch)
    assert loss.isfinite().all() and gradient.isfinite().all()


@for_each("name", POLICY_LOSSES)
@for_each("mode", AGGREGATIONS)
def test_policy_losses_have_the_same_gradient_for_any_split(name: str, mode: str) -> None:
    batch = make_batch(6)
    log_probs = batch.log_probs.clone().requires_grad_()
    tokens, sequences = local_counts(batch.mask).tolist()

    def loss_over(split: list[list[int]]) -> Tensor:
        """Return the loss of all micro-batches; ranks average their gradients."""
        counts = GlobalCounts(tokens, sequences, ranks=len(split))
        losses, start = [], 0
        for size in (size for rank in split for size in rank):
            rows = slice(start, start + size)
            values, _ = loss_of(name, batch, log_probs, rows)
            losses.append(aggregate(values, batch.mask[rows], mode, counts, scale_factor=7.0))
            start += size
        return torch.stack(losses).sum() / len(split)

    expected = loss_over([[16]])
    (expected_gradient,) = torch.autograd.grad(expected, log_probs)
    assert expected_gradient.any()
    for split in SPLITS:
        loss = loss_over(split)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@for_each("name", POLICY_LOSSES)
def test_policy_losses_without_valid_tokens_are_zero_and_have_a_gradient(name: str) -> None:
    batch = make_batch(0)
    batch.mask = torch.zeros_like(batch.mask)
    loss, gradient, _ = loss_gradient_and_metrics(name, batch.with_garbage())
    assert not loss.any() and not gradient.any()
