"""The losses of reward models: values by hand and by another implementation, gradients, garbage, metrics."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.reward_model_losses import REWARD_MODEL_LOSSES, bradley_terry, process_reward_loss
from rl_plugins.tests.algorithms.reference import reward_model_losses as reference
from rl_plugins.tests.loops import for_each

TOLERANCE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
SEEDS = range(3)


def pairs(seed: int, count: int = 30) -> dict[str, Any]:
    """Scores of every size, ties and near-certain pairs among them."""
    generator = torch.Generator().manual_seed(seed)
    chosen, rejected = 3 * torch.randn(2, count, generator=generator, dtype=torch.float64)
    chosen[0], rejected[0] = 1.5, 1.5
    chosen[1], rejected[1] = 400.0, -400.0
    chosen[2], rejected[2] = -400.0, 400.0
    margins = 3 * torch.rand(count, generator=generator, dtype=torch.float64)
    return {"chosen_scores_B": chosen, "rejected_scores_B": rejected, "margins_B": margins}


def steps(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(6, 9, generator=generator, dtype=torch.float64)
    scores[0, :4] = torch.tensor([400.0, -400.0, 400.0, -400.0])
    labels = torch.randint(2, (6, 9), generator=generator).double()
    labels[0, :4] = torch.tensor([1.0, 1.0, 0.0, 0.0])
    labels[1] = torch.rand(9, generator=generator, dtype=torch.float64)
    mask = (torch.rand(6, 9, generator=generator) < 0.5).double()
    mask[0, :4], mask[3] = 1, 0
    return {"scores_BT": scores, "labels_BT": labels, "label_mask_BT": mask}


def arrays(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() for name, value in inputs.items()}


@for_each("seed", SEEDS)
@for_each("centering", [0.0, 0.01])
@for_each("with_margins", [True, False])
def test_bradley_terry_agrees_with_the_second_implementation(seed: int, centering: float, with_margins: bool) -> None:
    inputs = pairs(seed)
    if not with_margins:
        del inputs["margins_B"]
    loss_B, _ = bradley_terry(**inputs, centering=centering)
    np.testing.assert_allclose(
        loss_B.numpy(), reference.bradley_terry(**arrays(inputs), centering=centering), **TOLERANCE
    )


@for_each("seed", SEEDS)
def test_process_reward_loss_agrees_with_the_second_implementation(seed: int) -> None:
    inputs = steps(seed)
    np.testing.assert_allclose(
        process_reward_loss(**inputs)[0].numpy(), reference.process_reward(**arrays(inputs)), **TOLERANCE
    )


def test_reward_model_losses_match_a_computation_by_hand() -> None:
    def tensor_of(x: float) -> Tensor:
        return torch.tensor([x], dtype=torch.float64)

    loss_B, metrics = bradley_terry(chosen_scores_B=tensor_of(math.log(3)), rejected_scores_B=tensor_of(0.0))
    assert float(loss_B) == pytest.approx(math.log(4 / 3))
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"accuracy": 1.0, "margin": math.log(3), "chosen_reward": math.log(3), "rejected_reward": 0.0}
    )
    loss_B, _ = bradley_terry(
        chosen_scores_B=tensor_of(2.0), rejected_scores_B=tensor_of(1.0), margins_B=tensor_of(1.0), centering=0.5
    )
    assert float(loss_B) == pytest.approx(math.log(2) + 0.5 * 9)
    loss_BT, steps_metrics = process_reward_loss(
        scores_BT=tensor_of(math.log(3))[None], labels_BT=tensor_of(0.0)[None], label_mask_BT=tensor_of(1.0)[None]
    )
    assert float(loss_BT) == pytest.approx(math.log(4))
    assert float(steps_metrics["reward"]) == pytest.approx(0.75)
    assert float(steps_metrics["accuracy"]) == 0


def test_reward_model_loss_gradients_agree_with_finite_differences() -> None:
    inputs = pairs(0)
    # Where the sigmoid is flat, differences of losses of size 400 say nothing.
    chosen, rejected = (inputs.pop(f"{name}_scores_B")[3:].requires_grad_() for name in ("chosen", "rejected"))
    margins = inputs["margins_B"][3:]

    def of_pairs(chosen_B: Tensor, rejected_B: Tensor) -> Tensor:
        return bradley_terry(chosen_scores_B=chosen_B, rejected_scores_B=rejected_B, margins_B=margins, centering=0.1)[
            0
        ]

    assert torch.autograd.gradcheck(of_pairs, (chosen, rejected))
    of_steps = steps(0)
    scores = of_steps.pop("scores_BT").clamp(-5, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: process_reward_loss(scores_BT=x, **of_steps)[0], scores)


def test_bradley_terry_has_finite_gradients_for_extreme_scores() -> None:
    inputs = pairs(1)
    chosen = inputs.pop("chosen_scores_B").requires_grad_()
    loss_B, _ = bradley_terry(chosen_scores_B=chosen, **inputs)
    (gradient_B,) = torch.autograd.grad(loss_B.sum(), chosen)
    assert float(gradient_B[1]) == pytest.approx(0) and float(gradient_B[2]) == pytest.approx(-1)


@for_each("garbage", [math.nan, math.inf, -math.inf])
def test_process_reward_loss_ignores_positions_without_a_label(garbage: float) -> None:
    inputs = steps(2)
    dirty = {name: value.clone() for name, value in inputs.items()}
    for name in ("scores_BT", "labels_BT"):
        dirty[name][inputs["label_mask_BT"] == 0] = garbage
    results = []
    for given in (inputs, dirty):
        scores = given["scores_BT"].clone().requires_grad_()
        loss_BT, metrics = process_reward_loss(**{**given, "scores_BT": scores})
        results.append((loss_BT, torch.autograd.grad(loss_BT.sum(), scores)[0], metrics["accuracy"]))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other) and clean.isfinite().all()
    assert not results[0][0][3].any()


def test_reward_model_losses_count_ties_as_wrong() -> None:
    zero = torch.zeros(2)
    assert not bradley_terry(chosen_scores_B=zero, rejected_scores_B=zero)[1]["accuracy"].any()
    labels = torch.tensor([[0.0, 1.0]])
    metrics = process_reward_loss(scores_BT=zero[None], labels_BT=labels, label_mask_BT=torch.ones(1, 2))[1]
    assert not metrics["accuracy"].any()


@for_each("centering", [-0.1, math.nan])
def test_bradley_terry_refuses_a_bad_centering(centering: float) -> None:
    with pytest.raises(ValueError, match="centering="):
        bradley_terry(**pairs(0), centering=centering)


def test_reward_model_losses_table_names_both_losses() -> None:
    assert dict(REWARD_MODEL_LOSSES) == {"bradley_terry": bradley_terry, "process_reward": process_reward_loss}
