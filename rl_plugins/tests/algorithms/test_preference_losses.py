"""The losses of preference optimization: values by hand and by another implementation, gradients, options, metrics."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    dpo,
    ipo,
    kto,
    kto_reference_point,
    orpo,
    rpo,
    simpo,
)
from rl_plugins.tests.algorithms.reference import preference_losses as reference
from rl_plugins.tests.algorithms.simulated_ranks import run_on_ranks
from rl_plugins.tests.loops import for_each

TOLERANCE: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
SEEDS = range(3)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {}),
    "cdpo": ("dpo", {"beta": 0.5, "label_smoothing": 0.1}),
    "dpo by length": ("dpo", {"beta": 5.0, "length_normalized": True}),
    "ipo": ("ipo", {}),
    "ipo by length": ("ipo", {"beta": 0.3, "length_normalized": True}),
    "rpo": ("rpo", {}),
    "rpo, all options": (
        "rpo",
        {"beta": 0.3, "nll_weight": 0.25, "label_smoothing": 0.2, "length_normalized": True},
    ),
    "orpo": ("orpo", {}),
    "orpo, weight": ("orpo", {"odds_weight": 1.5}),
    "simpo": ("simpo", {}),
    "simpo, options": ("simpo", {"beta": 10.0, "gamma": 3.0}),
    "simpo, no target": ("simpo", {"gamma": 0.0}),
    "kto": ("kto", {}),
    "kto, options": ("kto", {"beta": 0.5, "desirable_weight": 1.33, "undesirable_weight": 0.5}),
}


def pairs(seed: int, count: int = 30) -> dict[str, Tensor]:
    """Log-probs of responses of 1 to 20 tokens; ties and near-certain pairs among them."""
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    for which in ("chosen", "rejected"):
        lengths = torch.randint(1, 21, (count,), generator=generator).double()
        inputs[f"{which}_lengths_N"] = lengths
        for prefix in ("", "ref_"):
            per_token = -3 * torch.rand(count, generator=generator, dtype=torch.float64) - 0.01
            inputs[f"{prefix}{which}_log_probs_N"] = per_token * lengths
    for name in ("log_probs_N", "lengths_N"):
        inputs[f"rejected_{name}"][0] = inputs[f"chosen_{name}"][0]
    inputs["ref_rejected_log_probs_N"][0] = inputs["ref_chosen_log_probs_N"][0]
    inputs["chosen_log_probs_N"][1], inputs["rejected_log_probs_N"][1] = -0.001, -900.0
    inputs["chosen_log_probs_N"][2], inputs["rejected_log_probs_N"][2] = -900.0, -0.001
    return inputs


def judged(seed: int, count: int = 30) -> dict[str, Any]:
    """Good and bad responses on both sides of the reference point."""
    generator = torch.Generator().manual_seed(seed)
    log_probs, ref_log_probs = -20 * torch.rand(2, count, generator=generator, dtype=torch.float64)
    log_probs[0], log_probs[1] = -0.001, -900.0
    return {
        "log_probs_N": log_probs,
        "ref_log_probs_N": ref_log_probs,
        "desirable_N": torch.rand(count, generator=generator) < 0.5,
        "reference_point": torch.tensor(2.5, dtype=torch.float64),
    }


def inputs_of(name: str, seed: int) -> dict[str, Tensor]:
    everything = judged(seed) if name == "kto" else pairs(seed)
    wanted = inspect.signature(PREFERENCE_LOSSES[name]).parameters
    return {key: value for key, value in everything.items() if key in wanted}


def tensor_of(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


@for_each("seed", SEEDS)
@for_each("case", list(CASES))
def test_preference_losses_agree_with_the_second_implementation(case: str, seed: int) -> None:
    name, options = CASES[case]
    inputs = inputs_of(name, seed)
    loss_N, metrics = PREFERENCE_LOSSES[name](**inputs, **options)
    arrays = {key: value.numpy() for key, value in inputs.items()}
    np.testing.assert_allclose(loss_N.numpy(), getattr(reference, name)(**arrays, **options), **TOLERANCE)
    assert all(value.shape == loss_N.shape and not value.requires_grad for value in metrics.values())


@for_each("case", list(CASES))
def test_preference_loss_gradients_agree_with_finite_differences(case: str) -> None:
    name, options = CASES[case]
    inputs = {key: value if not value.ndim else value[3:] for key, value in inputs_of(name, 0).items()}
    learnt = [key for key in inputs if key.endswith("log_probs_N") and not key.startswith("ref_")]

    def loss(*values: Tensor) -> Tensor:
        loss_N, _ = PREFERENCE_LOSSES[name](**{**inputs, **dict(zip(learnt, values, strict=True))}, **options)
        return loss_N

    assert torch.autograd.gradcheck(loss, [inputs[key].clone().requires_grad_() for key in learnt])


@for_each("case", list(CASES))
@for_each("dtype", [torch.float32, torch.float64])
def test_preference_losses_of_near_certain_responses_have_finite_gradients(case: str, dtype: torch.dtype) -> None:
    name, options = CASES[case]
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs_of(name, 1).items()}
    for key in inputs:
        if key.endswith("log_probs_N"):
            # Certain to the last digit.
            inputs[key][:2] = 0.0
            inputs[key].requires_grad_(not key.startswith("ref_"))
    loss_N, _ = PREFERENCE_LOSSES[name](**inputs, **options)
    loss_N.sum().backward()
    assert loss_N.isfinite().all()
    for value in inputs.values():
        assert value.grad is None or (value.grad.isfinite().all() and value.grad.any())


@for_each("case", list(CASES))
def test_preference_losses_depend_on_each_example_alone(case: str) -> None:
    name, options = CASES[case]
    inputs = inputs_of(name, 2)
    clean, _ = PREFERENCE_LOSSES[name](**inputs, **options)
    dirty = {key: value.clone() for key, value in inputs.items()}
    for key, value in dirty.items():
        if value.is_floating_point() and value.ndim:
            value[5] = math.nan
        if key.endswith("log_probs_N"):
            value[6] = -1.0
    loss_N, _ = PREFERENCE_LOSSES[name](**dirty, **options)
    others = [index for index in range(len(clean)) if index not in (5, 6)]
    assert torch.equal(loss_N[others], clean[others])
    assert loss_N[5].isnan() and loss_N[6].isfinite()


def test_dpo_matches_a_computation_by_hand() -> None:
    # The chosen response has gained 2 nats on the reference, the rejected one has lost 1.
    loss_N, metrics = dpo(
        chosen_log_probs_N=tensor_of(-3.0),
        ref_chosen_log_probs_N=tensor_of(-5.0),
        rejected_log_probs_N=tensor_of(-4.0),
        ref_rejected_log_probs_N=tensor_of(-3.0),
        beta=math.log(3) / 3,
    )
    assert float(loss_N) == pytest.approx(math.log(4 / 3))
    beta = math.log(3) / 3
    expected = {"accuracy": 1.0, "margin": math.log(3), "chosen_reward": 2 * beta, "rejected_reward": -beta}
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected)


def test_ipo_rpo_orpo_simpo_and_kto_match_a_computation_by_hand() -> None:
    ratios: dict[str, Any] = {
        "chosen_log_probs_N": tensor_of(-3.0),
        "ref_chosen_log_probs_N": tensor_of(-5.0),
        "rejected_log_probs_N": tensor_of(-4.0),
        "ref_rejected_log_probs_N": tensor_of(-3.0),
    }
    assert float(ipo(**ratios, beta=0.25)[0]) == pytest.approx((3 - 2) ** 2)
    plain, _ = dpo(**ratios)
    loss_N, metrics = rpo(**ratios, chosen_lengths_N=tensor_of(6.0), nll_weight=2.0)
    assert float(loss_N - plain) == pytest.approx(2 * 3 / 6)
    assert float(metrics["nll"]) == pytest.approx(0.5)
    # Probabilities per token of 1/2 and 1/3: odds of 1 and 1/2.
    free: dict[str, Any] = {
        "chosen_log_probs_N": tensor_of(4 * math.log(1 / 2)),
        "rejected_log_probs_N": tensor_of(5 * math.log(1 / 3)),
        "chosen_lengths_N": tensor_of(4.0),
        "rejected_lengths_N": tensor_of(5.0),
    }
    loss_N, metrics = orpo(**free, odds_weight=0.5)
    assert float(loss_N) == pytest.approx(math.log(2) + 0.5 * math.log(3 / 2))
    assert float(metrics["log_odds_ratio"]) == pytest.approx(math.log(2))
    loss_N, _ = simpo(**free, beta=1.0, gamma=math.log(3 / 2))
    assert float(loss_N) == pytest.approx(math.log(2))
    good, metrics = kto(
        log_probs_N=tensor_of(-3.0),
        ref_log_probs_N=tensor_of(-5.0),
        desirable_N=torch.tensor([True]),
        reference_point=torch.tensor(1.0),
        beta=math.log(3),
        desirable_weight=2.0,
    )
    assert float(good) == pytest.approx(2 * (1 - 3 / 4))
    assert float(metrics["reward"]) == pytest.approx(2 * math.log(3)) and float(metrics["accuracy"]) == 1


def test_preference_losses_count_ties_as_wrong() -> None:
    for name in ("dpo", "ipo", "simpo", "orpo", "rpo"):
        _, metrics = PREFERENCE_LOSSES[name](**inputs_of(name, 0))
        assert float(metrics["accuracy"][0]) == 0, name
        assert 0 < float(metrics["accuracy"].mean()) < 1, name


def test_kto_passes_no_gradient_to_the_reference_point() -> None:
    inputs: dict[str, Any] = judged(0)
    inputs["reference_point"].requires_grad_()
    inputs["log_probs_N"].requires_grad_()
    kto(**inputs)[0].sum().backward()
    assert inputs["reference_point"].grad is None and inputs["log_probs_N"].grad is not None


@for_each("shift", [0.0, 30.0])
def test_kto_reference_point_is_the_mean_over_all_ranks(shift: float) -> None:
    generator = torch.Generator().manual_seed(0)
    of_ranks = [torch.randn(2, count, generator=generator, dtype=torch.float64) for count in (4, 0, 7)]
    of_ranks = [torch.stack([policy + 1 - shift, ref]) for policy, ref in of_ranks]
    points = run_on_ranks(
        3,
        lambda rank, reduce, gather: kto_reference_point(
            mismatched_log_probs_N=of_ranks[rank][0],
            mismatched_ref_log_probs_N=of_ranks[rank][1],
            sum_over_ranks=reduce,
        ),
    )
    expected = reference.kto_reference_point([r[0].numpy() for r in of_ranks], [r[1].numpy() for r in of_ranks])
    assert (expected == 0) == bool(shift)
    assert [float(point) for point in points] == pytest.approx([expected] * 3)


def test_kto_reference_point_without_mismatched_pairs_is_0() -> None:
    nothing = torch.zeros(0)
    assert float(kto_reference_point(mismatched_log_probs_N=nothing, mismatched_ref_log_probs_N=nothing)) == 0


def test_dpo_ipo_rpo_and_kto_take_reference_log_probs() -> None:
    def names_reference(name: str) -> bool:
        return any(key.startswith("ref_") for key in inspect.signature(PREFERENCE_LOSSES[name]).parameters)

    assert {name for name in PREFERENCE_LOSSES if names_reference(name)} == {"dpo", "ipo", "rpo", "kto"}


@for_each(
    ("name", "options", "message"),
    [
        ("dpo", {"beta": 0.0}, "beta=0.0: must be above 0"),
        ("dpo", {"label_smoothing": 0.5}, "label_smoothing=0.5: must be 0 or more and below"),
        ("ipo", {"beta": math.nan}, "beta=nan"),
        ("rpo", {"nll_weight": -1.0}, "nll_weight=-1.0"),
        ("orpo", {"odds_weight": 0.0}, "odds_weight=0.0"),
        ("simpo", {"beta": -1.0}, "beta=-1.0"),
        ("simpo", {"gamma": -0.5}, "gamma=-0.5"),
        ("kto", {"beta": 0.0}, "beta=0.0"),
        ("kto", {"undesirable_weight": -1.0}, "undesirable_weight=-1.0"),
    ],
)
def test_preference_losses_refuse_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PREFERENCE_LOSSES[name](**inputs_of(name, 0), **options)


@for_each("name", ["dpo", "ipo"])
def test_length_normalized_losses_need_lengths(name: str) -> None:
    inputs = {key: value for key, value in inputs_of(name, 0).items() if "lengths" not in key}
    with pytest.raises(ValueError, match="length_normalized needs chosen_lengths_N"):
        PREFERENCE_LOSSES[name](**inputs, length_normalized=True)
