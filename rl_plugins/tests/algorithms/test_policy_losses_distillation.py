"""The forward KL to a teacher over its k most likely tokens: values, gradients, bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.policy_losses import POLICY_LOSSES
from rl_plugins.tests.algorithms.reference import distillation as reference
from rl_plugins.tests.algorithms.reference.inputs import make_inputs, pick
from rl_plugins.tests.loops import for_each

K = 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"loss_max_clamp": 0.4},
    {"log_prob_min_clamp": -2.5},
    {"log_prob_min_clamp": -1.5, "loss_max_clamp": 0.3},
]
forward_kl_top_k = POLICY_LOSSES["forward_kl_top_k"]


def tops(seed: int, *, weighted: bool = False) -> dict[str, Any]:
    """Log-probs of K of 9 tokens: the teacher's largest; NaN where masked. With weights, as of several teachers."""
    rng = np.random.default_rng(seed)
    mask_BT = make_inputs(seed)["loss_mask_BT"]
    logits = 2 * rng.normal(size=(2, *mask_BT.shape, 9))
    # Some positions where the student agrees more with the teacher's tokens than the teacher does.
    logits[1, ::3] = 3 * logits[0, ::3]
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    ids = np.argsort(-log_probs[0], axis=-1)[..., :K]
    of_teacher, of_student = (np.take_along_axis(one, ids, axis=-1) for one in log_probs)
    masked = mask_BT[..., None] == 0
    weights = {"teacher_top_weights_BTK": np.where(masked, np.nan, rng.uniform(0.1, 1.0, of_teacher.shape))}
    return {
        **(weights if weighted else {}),
        "teacher_top_log_probs_BTK": np.where(masked, np.nan, of_teacher),
        "top_log_probs_BTK": np.where(masked, np.nan, of_student),
        "response_mask_BT": mask_BT,
    }


def loss_of(given: dict[str, Any], top_BTK: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    others = pick(make_inputs(0), "log_probs_BT", "old_log_probs_BT", "advantages_BT")
    inputs = {name: torch.from_numpy(array) for name, array in {**others, **given}.items()}
    return forward_kl_top_k(**{**inputs, "top_log_probs_BTK": top_BTK}, **options)


@for_each("seed", range(4))
@for_each("options", OPTIONS)
@for_each("weighted", [False, True])
def test_forward_kl_top_k_and_gradient_agree_with_the_second_implementation(
    weighted: bool, options: dict[str, Any], seed: int
) -> None:
    given = tops(seed, weighted=weighted)
    mask_BT = given["response_mask_BT"].astype(bool)
    expected_BT = reference.forward_kl_top_k(**given, **options)
    # Every branch is there: below 0, between, and beyond the bound.
    assert (expected_BT[mask_BT] == 0).any() and (expected_BT[mask_BT] > 0).any()
    assert (expected_BT[mask_BT] == options.get("loss_max_clamp", -1)).any() == ("loss_max_clamp" in options)
    top_BTK = torch.from_numpy(given["top_log_probs_BTK"].copy()).requires_grad_()
    loss_BT, _ = loss_of(given, top_BTK, **options)
    np.testing.assert_allclose(loss_BT.detach().numpy(), expected_BT, rtol=1e-9, atol=1e-9)
    (gradient_BTK,) = torch.autograd.grad(loss_BT.sum(), top_BTK)
    step = 1e-6
    for k in range(K):
        shift = step * (np.arange(K) == k)
        above, below = (
            reference.forward_kl_top_k(
                **{**given, "top_log_probs_BTK": given["top_log_probs_BTK"] + sign * shift}, **options
            )
            for sign in (1, -1)
        )
        slopes_BT = (above - below) / (2 * step)
        np.testing.assert_allclose(gradient_BTK[..., k].numpy(), slopes_BT, rtol=1e-6, atol=1e-8)


def test_forward_kl_top_k_over_all_tokens_is_the_exact_forward_kl() -> None:
    generator = torch.Generator().manual_seed(3)
    teacher, student = torch.randn((2, 2, 4, 9), generator=generator, dtype=torch.float64).log_softmax(-1)
    student.requires_grad_()
    zeros = torch.zeros(2, 4)
    loss, metrics = forward_kl_top_k(
        log_probs_BT=zeros,
        old_log_probs_BT=zeros,
        advantages_BT=zeros,
        response_mask_BT=torch.ones(2, 4),
        teacher_top_log_probs_BTK=teacher,
        top_log_probs_BTK=student,
    )
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=teacher), torch.distributions.Categorical(logits=student)
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["forward_kl"], expected.detach())
    torch.testing.assert_close(metrics["teacher_mass"], torch.ones(2, 4).double())
    (gradient,) = torch.autograd.grad(loss.sum(), student)
    torch.testing.assert_close(gradient, -teacher.exp())


def test_forward_kl_top_k_is_zero_for_a_policy_equal_to_the_teacher() -> None:
    given = tops(1)
    of_teacher = torch.from_numpy(given["teacher_top_log_probs_BTK"])
    loss, metrics = loss_of(given, of_teacher)
    assert not loss.any() and not metrics["forward_kl"].any()
    torch.testing.assert_close(metrics["student_mass"], metrics["teacher_mass"])


@for_each("weight", [0.0, 0.7])
def test_forward_kl_top_k_adds_policy_weight_times_ppo_clip(weight: float) -> None:
    given = tops(2)
    others = {
        name: torch.from_numpy(array)
        for name, array in pick(make_inputs(0), "log_probs_BT", "old_log_probs_BT", "advantages_BT").items()
    }
    top_BTK = torch.from_numpy(given["top_log_probs_BTK"])
    alone, alone_metrics = loss_of(given, top_BTK)
    both, metrics = loss_of(given, top_BTK, policy_weight=weight, clip_high=0.28, dual_clip=None)
    surrogate, _ = POLICY_LOSSES["ppo_clip"](
        **others,
        response_mask_BT=torch.from_numpy(given["response_mask_BT"]),
        clip_high=0.28,
        dual_clip=None,
    )
    torch.testing.assert_close(both, alone + weight * surrogate)
    assert ("clip_fraction" in metrics) == (weight > 0) and "clip_fraction" not in alone_metrics
    torch.testing.assert_close(metrics["ppo_kl"], alone_metrics["ppo_kl"])


@for_each(
    ("options", "message"),
    [
        ({"policy_weight": -1.0}, r"policy_weight=-1\.0: must be 0 or more"),
        ({"loss_max_clamp": 0.0}, r"loss_max_clamp=0\.0: must be above 0"),
        ({"log_prob_min_clamp": 10.0}, r"log_prob_min_clamp=10\.0: must be below 0"),
    ],
)
def test_forward_kl_top_k_refuses_bad_options(options: dict[str, float], message: str) -> None:
    given = tops(0)
    with pytest.raises(ValueError, match=message):
        loss_of(given, torch.from_numpy(given["top_log_probs_BTK"]), **options)
