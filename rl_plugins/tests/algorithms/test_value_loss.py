"""The critic's loss: every branch by hand, gradients, garbage and splitting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl_plugins.algorithms.aggregation import AGGREGATIONS, GlobalCounts, aggregate
from rl_plugins.algorithms.value_loss import value_loss
from rl_plugins.tests.loops import for_each


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


@for_each(
    ("value", "old", "target", "loss", "gradient", "clipped"),
    [
        (1.2, 1.0, 2.0, 0.32, -0.8, 0),  # Inside the range.
        (1.5, 1.0, 2.0, 0.125, -0.5, 0),  # At the edge of the range.
        (1.75, 1.0, 2.0, 0.125, 0.0, 1),  # Further than the range, towards the return: the error at 1.5.
        (0.25, 1.0, 0.0, 0.125, 0.0, 1),  # The same downwards: the error at 0.5.
        (0.25, 1.0, 2.0, 1.53125, -1.75, 0),  # Further from the return: the error of the value without clipping.
        (1.75, 1.0, 0.0, 1.53125, 1.75, 0),
        (2.0, 2.0, 2.0, 0.0, 0.0, 0),
    ],
)
def test_value_loss_matches_a_computation_by_hand(
    value: float, old: float, target: float, loss: float, gradient: float, clipped: int
) -> None:
    values = row(value).requires_grad_()
    inputs: dict[str, Any] = {"old_values_BT": row(old), "returns_BT": row(target), "response_mask_BT": row(1)}
    found, metrics = value_loss(values_BT=values, **inputs)
    assert float(found.detach()) == pytest.approx(loss)
    assert float(torch.autograd.grad(found.sum(), values)[0]) == pytest.approx(gradient)
    assert float(metrics["value_clip_fraction"]) == clipped
    plain, nothing = value_loss(values_BT=values, **inputs, clip=None)
    assert float(plain.detach()) == pytest.approx((value - target) ** 2 / 2) and nothing == {}
    assert float(torch.autograd.grad(plain.sum(), values)[0]) == pytest.approx(value - target)


def random_inputs(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    values, steps, returns = torch.randn(3, 8, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(8, 6, generator=generator) < 0.6).double()
    mask[3] = 0
    return {"values_BT": values, "old_values_BT": values + steps, "returns_BT": returns, "response_mask_BT": mask}


@for_each("clip", [None, 0.2, 0.5])
def test_value_loss_gradients_agree_with_finite_differences(clip: float | None) -> None:
    inputs = random_inputs(0)
    values = inputs.pop("values_BT").requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(values_BT=x, **inputs, clip=clip)[0], values)


@for_each("garbage", [math.nan, math.inf, -math.inf])
@for_each("clip", [None, 0.5])
def test_value_loss_ignores_masked_positions(clip: float | None, garbage: float) -> None:
    clean = random_inputs(1)
    masked = clean["response_mask_BT"] == 0
    dirty = {name: x if name == "response_mask_BT" else x.masked_fill(masked, garbage) for name, x in clean.items()}
    results = []
    for inputs in (clean, dirty):
        values = inputs["values_BT"].clone().requires_grad_()
        loss, metrics = value_loss(**{**inputs, "values_BT": values}, clip=clip)
        (gradient,) = torch.autograd.grad(loss.sum(), values)
        results.append((loss.detach(), gradient, *metrics.values()))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)
        assert not clean[masked].any()


@for_each("mode", AGGREGATIONS)
@for_each("parts", [2, 4, 8])
def test_value_loss_gradient_does_not_depend_on_micro_batches(mode: str, parts: int) -> None:
    inputs = random_inputs(2)
    mask = inputs["response_mask_BT"]
    counts = GlobalCounts(tokens=float(mask.sum()), sequences=float((mask.sum(-1) > 0).sum()))
    values = inputs.pop("values_BT").requires_grad_()

    def gradient(pieces: int) -> torch.Tensor:
        total = torch.zeros_like(values)
        for index in torch.arange(8).tensor_split(pieces):
            loss, _ = value_loss(values_BT=values[index], **{name: x[index] for name, x in inputs.items()})
            total += torch.autograd.grad(aggregate(loss, mask[index], mode, counts, scale_factor=6.0), values)[0]
        return total

    torch.testing.assert_close(gradient(parts), gradient(1))


@for_each("clip", [0.0, -1.0, math.nan])
def test_value_loss_refuses_a_bad_clip(clip: float) -> None:
    with pytest.raises(ValueError, match="clip="):
        value_loss(**random_inputs(3), clip=clip)
