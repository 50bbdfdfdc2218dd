"""Importance weights, rejection and diagnostics: by hand, by loops over tokens, over ranks, and with garbage."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.algorithms.rollout_correction import (
    ROLLOUT_CORRECTIONS,
    Level,
    Rejection,
    RejectionMode,
    RolloutCorrection,
    diagnostics,
    importance_weights,
    rejection_mask,
)
from rl_plugins.tests.algorithms.simulated_ranks import run_on_ranks
from rl_plugins.tests.loops import for_each

LEVELS: tuple[Level, ...] = get_args(Level)
LOG2 = math.log(2)
# By hand: two sequences with an observation and padding, and an empty sequence. The ratios are powers of two.
MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
RATIOS = torch.tensor([[2.0, 9.0, 0.5, 4.0], [0.25, 1.0, 9.0, 9.0], [9.0] * 4], dtype=torch.float64)
ROLLOUT = torch.full((3, 4), -3.0, dtype=torch.float64)
HAND: dict[str, Any] = {
    "log_probs_BT": ROLLOUT + RATIOS.log(),
    "rollout_log_probs_BT": ROLLOUT,
    "response_mask_BT": MASK,
}
TOKEN_STATISTICS: dict[str, Callable[[float], float]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
}
THRESHOLDS: dict[str, list[Any]] = {"k1": [1.5, 3.0, (0.3, 1.1), (0.9, 20.0)], "k2": [0.1, 1.0], "k3": [0.1, 1.0]}
RULES = [Rejection(mode, value) for mode in get_args(RejectionMode) for value in THRESHOLDS[mode[-2:]]]


def random_inputs(seed: int, samples: int = 12, width: int = 7, spread: float = 0.6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(samples, width, generator=generator, dtype=torch.float64) * 3
    log_probs = rollout + spread * torch.randn(samples, width, generator=generator, dtype=torch.float64)
    mask = (torch.rand(samples, width, generator=generator) < 0.7).long()
    mask[0] = 0
    log_probs[1, :3] = rollout[1, :3] + torch.tensor([25.0, -25.0, 21.0])
    mask[1, :3] = 1
    return {"log_probs_BT": log_probs, "rollout_log_probs_BT": rollout, "response_mask_BT": mask}


def with_garbage(inputs: dict[str, Any], garbage: float) -> dict[str, Any]:
    masked = inputs["response_mask_BT"] == 0
    return {name: x if name == "response_mask_BT" else x.masked_fill(masked, garbage) for name, x in inputs.items()}


def rows(inputs: dict[str, Any], index: Any) -> dict[str, Any]:
    return {name: x[index] for name, x in inputs.items()}


def log_ratios(inputs: dict[str, Any]) -> list[list[float]]:
    """The log-ratios of the valid tokens of each sequence."""
    d = inputs["log_probs_BT"] - inputs["rollout_log_probs_BT"]
    return [row[mask.bool()].tolist() for row, mask in zip(d, inputs["response_mask_BT"], strict=True)]


def on_ranks(count: int, work: Callable[..., Any]) -> list[Any]:
    """`work(rank, sum_over_ranks, max_over_ranks)` in a thread per rank, with real exchanges between the threads."""
    return run_on_ranks(
        count,
        lambda rank, sum_over_ranks, gather: work(rank, sum_over_ranks, lambda x: gather(x[None]).amax(dim=0)),
    )


@for_each(
    ("options", "expected"),
    [
        ({}, [[2, 0, 0.5, 4], [0.25, 1, 0, 0]]),
        ({"cap": 2.0}, [[2, 0, 0.5, 2], [0.25, 1, 0, 0]]),
        ({"band": (0.4, 2.1)}, [[2, 0, 0.5, 0], [0, 1, 0, 0]]),
        ({"normalize": True}, [[2 / 1.55, 0, 0.5 / 1.55, 4 / 1.55], [0.25 / 1.55, 1 / 1.55, 0, 0]]),
        ({"cap": 1.0, "normalize": True}, [[1 / 0.75, 0, 0.5 / 0.75, 1 / 0.75], [0.25 / 0.75, 1 / 0.75, 0, 0]]),
        ({"level": "sequence"}, [[4, 0, 4, 4], [0.25, 0.25, 0, 0]]),
        ({"level": "sequence", "cap": 3.0}, [[3, 0, 3, 3], [0.25, 0.25, 0, 0]]),
        ({"level": "sequence", "band": (0.5, 5.0)}, [[4, 0, 4, 4], [0, 0, 0, 0]]),
        # The mean over sequences, (4 + 0.25) / 2, not over tokens, (3 * 4 + 2 * 0.25) / 5.
        ({"level": "sequence", "normalize": True}, [[32 / 17, 0, 32 / 17, 32 / 17], [2 / 17, 2 / 17, 0, 0]]),
        # Nothing survives: not divided by 0.
        ({"band": (100.0, 200.0), "normalize": True}, [[0, 0, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_importance_weights_match_a_computation_by_hand(options: dict[str, Any], expected: list[list[float]]) -> None:
    weights = importance_weights(**HAND, **options)
    torch.testing.assert_close(weights, torch.tensor([*expected, [0, 0, 0, 0]], dtype=torch.float64))


@for_each("level", ["token", "sequence"])
def test_importance_weights_agree_with_plain_loops_and_have_bounded_exponents(level: Any) -> None:
    inputs = random_inputs(0)
    weights = importance_weights(**inputs, level=level)
    for i, ratios in enumerate(log_ratios(inputs)):
        exponents = ratios if level == "token" else [math.fsum(ratios)] * len(ratios)
        expected = [math.exp(min(max(x, -20.0), 20.0)) for x in exponents]
        assert weights[i][inputs["response_mask_BT"][i].bool()].tolist() == pytest.approx(expected, rel=1e-12)
    assert float(weights.max()) == (pytest.approx(math.exp(20)) if level == "token" else weights.max())
    assert not weights[inputs["response_mask_BT"] == 0].any()


def test_rollout_correction_of_equal_policies_changes_nothing() -> None:
    inputs = random_inputs(1)
    inputs["log_probs_BT"] = inputs["rollout_log_probs_BT"].clone()
    mask = inputs["response_mask_BT"]
    for level in LEVELS:
        for normalize in (False, True):
            weights = importance_weights(**inputs, level=level, normalize=normalize)
            torch.testing.assert_close(weights, mask.double())
    always = [Rejection(rule.mode, 1.0 if rule.estimator == "k1" else 0.0) for rule in RULES]
    assert torch.equal(rejection_mask(**inputs, rules=always), mask)
    found = diagnostics(**inputs, weights_BT=weights)
    assert found.pop("training_ppl") == found.pop("rollout_ppl") > 1
    assert (found.pop("ppl_ratio"), found.pop("ess")) == (1, pytest.approx(1))
    assert set(found.values()) == {0.0}


def test_importance_weights_have_no_gradient_and_widen_half_precision() -> None:
    inputs = random_inputs(2)
    inputs["log_probs_BT"] = inputs["log_probs_BT"].float().requires_grad_()
    weights = importance_weights(**inputs, normalize=True)
    assert not weights.requires_grad and weights.dtype == torch.float32
    assert not rejection_mask(**inputs, rules=RULES).requires_grad
    diagnostics(**inputs, weights_BT=weights)
    halves = {name: x.bfloat16() if x.is_floating_point() else x for name, x in random_inputs(2).items()}
    assert importance_weights(**halves).dtype == torch.float32


@for_each("garbage", [math.nan, math.inf, -math.inf])
def test_rollout_correction_ignores_masked_positions(garbage: float) -> None:
    clean = random_inputs(3)
    dirty = with_garbage(clean, garbage)
    for level in LEVELS:
        for normalize in (False, True):
            options: dict[str, Any] = {"level": level, "normalize": normalize, "cap": 2.0}
            weights = importance_weights(**clean, **options)
            assert torch.equal(importance_weights(**dirty, **options), weights)
    for rule in RULES:
        assert torch.equal(rejection_mask(**dirty, rules=[rule]), rejection_mask(**clean, rules=[rule]))
    dirty_weights = weights.masked_fill(clean["response_mask_BT"] == 0, garbage)
    assert diagnostics(**dirty, weights_BT=dirty_weights) == diagnostics(**clean, weights_BT=weights)


@for_each("function", ["weights", "mask", "diagnostics"])
def test_rollout_correction_refuses_and_counts_log_probs_that_are_not_finite(function: str) -> None:
    inputs = with_garbage(random_inputs(4), math.nan)
    positions = inputs["response_mask_BT"].nonzero()
    inputs["log_probs_BT"][tuple(positions[3])] = -math.inf
    inputs["log_probs_BT"][tuple(positions[4])] = math.nan
    inputs["rollout_log_probs_BT"][tuple(positions[5])] = math.inf
    with pytest.raises(ValueError, match=f"2 of the training policy and 1 of the rollout policy, of {len(positions)} "):
        if function == "weights":
            importance_weights(**inputs)
        elif function == "mask":
            rejection_mask(**inputs, rules=[])
        else:
            diagnostics(**inputs)


# The log-ratios of HAND in units of log 2: [1, -1, 2] and [-2, 0].
@for_each(
    ("mode", "threshold", "expected"),
    [
        ("token_k1", 2.1, [[1, 0, 1, 0], [0, 1, 0, 0]]),
        # The band bounds p_rollout / p_training: 1/2, 2, 1/4 and 4, 1.
        ("token_k1", (0.2, 1.5), [[1, 0, 0, 1], [0, 1, 0, 0]]),
        ("token_k2", LOG2**2 * 0.51, [[1, 0, 1, 0], [0, 1, 0, 0]]),
        # e^d - 1 - d: 0.307, 0.193, 1.614 and 0.636, 0.
        ("token_k3", 0.25, [[0, 0, 1, 0], [0, 1, 0, 0]]),
        ("token_k3", 0.7, [[1, 0, 1, 0], [1, 1, 0, 0]]),
        ("seq_sum_k1", (0.2, 2.0), [[1, 0, 1, 1], [0, 0, 0, 0]]),
        ("seq_sum_k1", (0.5, 4.1), [[0, 0, 0, 0], [1, 1, 0, 0]]),
        ("seq_sum_k2", LOG2**2 * 2.5, [[0, 0, 0, 0], [1, 1, 0, 0]]),
        ("seq_sum_k3", 1.0, [[0, 0, 0, 0], [1, 1, 0, 0]]),
        # Means of -d: -2/3 and 1.
        ("seq_mean_k1", 1.9, [[1, 0, 1, 1], [0, 0, 0, 0]]),
        ("seq_mean_k1", (0.7, 2.1), [[0, 0, 0, 0], [1, 1, 0, 0]]),
        # Means of d^2 / 2: 1 and 1.
        ("seq_mean_k2", LOG2**2 * 1.01, [[1, 0, 1, 1], [1, 1, 0, 0]]),
        ("seq_mean_k2", LOG2**2 * 0.99, [[0, 0, 0, 0], [0, 0, 0, 0]]),
        ("seq_mean_k3", 0.5, [[0, 0, 0, 0], [1, 1, 0, 0]]),
        ("seq_max_k2", LOG2**2 * 2.01, [[1, 0, 1, 1], [1, 1, 0, 0]]),
        ("seq_max_k2", LOG2**2 * 1.99, [[0, 0, 0, 0], [0, 0, 0, 0]]),
        ("seq_max_k3", 1.0, [[0, 0, 0, 0], [1, 1, 0, 0]]),
    ],
)
def test_rejection_mask_matches_a_computation_by_hand(
    mode: RejectionMode, threshold: Any, expected: list[list[int]]
) -> None:
    assert rejection_mask(**HAND, rules=[Rejection(mode, threshold)]).tolist() == [*expected, [0, 0, 0, 0]]


@for_each("rule", RULES)
def test_rejection_mask_agrees_with_plain_loops(rule: Rejection) -> None:
    outcomes = set()
    for seed in range(4):
        inputs = random_inputs(seed)
        kept = rejection_mask(**inputs, rules=[rule])
        assert kept.dtype == inputs["response_mask_BT"].dtype
        assert not kept[inputs["response_mask_BT"] == 0].any()
        for i, ratios in enumerate(log_ratios(inputs)):
            found = kept[i][inputs["response_mask_BT"][i].bool()].tolist()
            statistics = [TOKEN_STATISTICS[rule.estimator](min(max(d, -20.0), 20.0)) for d in ratios]
            if not ratios:
                continue
            if rule.reach == "seq_sum":
                statistics = [math.fsum(statistics)] * len(ratios)
            elif rule.reach == "seq_mean":
                statistics = [math.fsum(statistics) / len(ratios)] * len(ratios)
            elif rule.reach == "seq_max":
                statistics = [max(statistics)] * len(ratios)
            if isinstance(rule.threshold, tuple):
                low, high = (math.log(ratio) for ratio in rule.threshold)
            elif rule.estimator == "k1":
                low, high = -math.log(rule.threshold), math.log(rule.threshold)
            else:
                low, high = -math.inf, rule.threshold
            assert found == [int(low <= x <= high) for x in statistics]
            outcomes |= set(found)
    assert outcomes == {0, 1}


def test_rejection_mask_requires_all_rules_in_any_order() -> None:
    inputs = random_inputs(5, spread=0.1)
    rules = [Rejection("token_k1", 1.1), Rejection("seq_sum_k2", 0.05), Rejection("seq_max_k3", 0.02)]
    product = inputs["response_mask_BT"]
    for rule in rules:
        product = product * rejection_mask(**inputs, rules=[rule])
    assert torch.equal(rejection_mask(**inputs, rules=rules), product)
    assert torch.equal(rejection_mask(**inputs, rules=rules[::-1]), product)
    assert 0 < int(product.sum()) < int(rejection_mask(**inputs, rules=rules[:1]).sum())
    assert torch.equal(rejection_mask(**inputs, rules=[]), inputs["response_mask_BT"])


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), split=st.integers(0, 12))
def test_importance_weights_and_rejection_mask_depend_on_each_row_alone(seed: int, split: int) -> None:
    inputs = random_inputs(seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    for level in LEVELS:
        whole = importance_weights(**inputs, level=level, cap=2.0)
        parts = [importance_weights(**rows(inputs, part), level=level, cap=2.0) for part in order.tensor_split([split])]
        assert torch.equal(torch.cat(parts), whole[order])
    for rule in RULES:
        kept = [rejection_mask(**rows(inputs, part), rules=[rule]) for part in order.tensor_split([split])]
        assert torch.equal(torch.cat(kept), rejection_mask(**inputs, rules=[rule])[order])


@for_each("splits", [[5], [0], [12], [2, 9]])
@for_each("level", ["token", "sequence"])
def test_normalized_weights_and_diagnostics_on_ranks_equal_one_rank(level: Any, splits: list[int]) -> None:
    """One rank has no sample in some splits. Normalised weights have mean 1: over tokens, or over sequences."""
    inputs = random_inputs(6)
    parts = torch.arange(12).tensor_split(splits)
    whole = importance_weights(**inputs, level=level, normalize=True)
    expected = diagnostics(**inputs, weights_BT=whole)

    def on_rank(rank: int, sum_over_ranks: Any, max_over_ranks: Any) -> tuple[Tensor, dict[str, float]]:
        part = rows(inputs, parts[rank])
        weights = importance_weights(**part, level=level, normalize=True, sum_over_ranks=sum_over_ranks)
        exchanges: dict[str, Any] = {"sum_over_ranks": sum_over_ranks, "max_over_ranks": max_over_ranks}
        return weights, diagnostics(**part, weights_BT=weights, **exchanges)

    results = on_ranks(len(parts), on_rank)
    torch.testing.assert_close(torch.cat([weights for weights, _ in results]), whole)
    for _, found in results:
        assert found == pytest.approx(expected, rel=1e-10)
    mask = inputs["response_mask_BT"].bool()
    means = (
        whole[mask] if level == "token" else torch.stack([w[m][0] for w, m in zip(whole, mask, strict=True) if m.any()])
    )
    assert float(means.mean()) == pytest.approx(1.0)


def test_diagnostics_match_a_computation_by_hand() -> None:
    weights = importance_weights(**HAND)
    found = diagnostics(**HAND, weights_BT=weights)
    differences = (-2 / 3 * LOG2, 1 * LOG2)
    assert found == pytest.approx(
        {
            "training_ppl": (math.exp(3) * 2 ** (-2 / 3) + math.exp(3) * 2) / 2,
            "rollout_ppl": math.exp(3),
            "kl": 0.0,  # The log-ratios 1, -1, 2, -2, 0 add up to 0.
            "k3": 7.75 / 5 - 1,
            "log_ppl_difference": sum(differences) / 2,
            "log_ppl_abs_difference": (2 / 3 + 1) / 2 * LOG2,
            "log_ppl_difference_max": differences[1],
            "log_ppl_difference_min": differences[0],
            "ppl_ratio": (2 ** (-2 / 3) + 2) / 2,
            "chi2_token": (4 + 0.25 + 16 + 1 / 16 + 1) / 5 - 1,
            "chi2_sequence": (16 + 1 / 16) / 2 - 1,
            "ess": 1.55**2 / ((4 + 0.25 + 16 + 1 / 16 + 1) / 5),
        },
        abs=1e-12,
    )
    assert "ess" not in diagnostics(**HAND)
    assert diagnostics(**HAND, weights_BT=torch.zeros_like(weights))["ess"] == 0.0


@for_each("shape", [(3, 4), (2, 0), (0, 4)])
def test_rollout_correction_of_a_batch_without_valid_tokens_is_zero(shape: tuple[int, int]) -> None:
    inputs: dict[str, Any] = {
        "log_probs_BT": torch.full(shape, math.nan),
        "rollout_log_probs_BT": torch.full(shape, math.nan),
        "response_mask_BT": torch.zeros(shape),
    }
    for level in LEVELS:
        assert torch.equal(importance_weights(**inputs, level=level, normalize=True), torch.zeros(shape))
    for rule in RULES:
        assert torch.equal(rejection_mask(**inputs, rules=[rule]), torch.zeros(shape))
    assert set(diagnostics(**inputs, weights_BT=torch.zeros(shape)).values()) == {0.0}


def test_rollout_correction_stays_finite_for_extreme_log_ratios() -> None:
    inputs = random_inputs(7)
    inputs["log_probs_BT"] = inputs["rollout_log_probs_BT"] + 1e6 * (inputs["log_probs_BT"] - 0.1)
    inputs["rollout_log_probs_BT"] = inputs["rollout_log_probs_BT"].float()
    for level in LEVELS:
        weights = importance_weights(**inputs, level=level, normalize=True)
        assert weights.isfinite().all()
    found = diagnostics(**inputs, weights_BT=weights)
    assert all(math.isfinite(found[name]) for name in ("kl", "k3", "chi2_token", "chi2_sequence", "ppl_ratio", "ess"))


@for_each(
    ("mode", "threshold"),
    [
        ("seq_max_k1", 2.0),
        ("token", 2.0),
        ("token_k1", 0.5),
        ("token_k1", 0.0),
        ("token_k1", (2.0, 0.5)),
        ("token_k1", (0.0, 2.0)),
        ("token_k1", -1.0),
        ("token_k2", -0.1),
        ("seq_mean_k3", (0.1, 0.2)),
    ],
)
def test_rejection_refuses_bad_rules(mode: Any, threshold: Any) -> None:
    with pytest.raises(ValueError, match=mode):
        Rejection(mode, threshold)


@for_each(
    ("options", "message"),
    [
        ({"level": "group"}, "level='group'"),
        ({"level": "token", "cap": 0.0}, "cap=0.0"),
        ({"level": "token", "band": (2.0, 1.0)}, "band="),
        ({"level": "token", "cap": 2.0, "band": (0.5, 2.0)}, "one of the two"),
        ({"cap": 2.0}, "set level"),
        ({"normalize": True}, "set level"),
        ({"level": "token", "normalize": True, "bypass": True}, "the split of the batch"),
    ],
)
def test_rollout_correction_refuses_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutCorrection(**options)


def test_rollout_corrections_table_holds_the_presets() -> None:
    sequence_tis = RolloutCorrection(level="sequence", cap=2.0)
    k3 = (Rejection("seq_mean_k3", 0.01),)
    assert ROLLOUT_CORRECTIONS["none"] == RolloutCorrection()
    assert ROLLOUT_CORRECTIONS["bypass"] == RolloutCorrection(bypass=True)
    assert ROLLOUT_CORRECTIONS["sequence_tis"] == sequence_tis
    assert ROLLOUT_CORRECTIONS["icepop"] == RolloutCorrection(level="token", band=(0.5, 5.0))
    assert ROLLOUT_CORRECTIONS["mis"] == RolloutCorrection(
        "sequence", 2.0, rules=(Rejection("seq_sum_k1", (0.5, 2.0)),)
    )
    assert ROLLOUT_CORRECTIONS["geo_rs"] == RolloutCorrection(rules=(Rejection("seq_mean_k1", (0.999, 1.001)),))
    assert ROLLOUT_CORRECTIONS["k3_rs_token_tis"] == RolloutCorrection("token", 2.0, rules=k3)
    assert ROLLOUT_CORRECTIONS["bypass_k3_rs_sequence_tis"] == RolloutCorrection("sequence", 2.0, rules=k3, bypass=True)
    assert len(ROLLOUT_CORRECTIONS) == 22
    inputs = random_inputs(8)
    for correction in ROLLOUT_CORRECTIONS.values():
        mask, weights = correction.correct(**inputs)
        assert torch.equal(mask, rejection_mask(**inputs, rules=correction.rules))
        assert (weights is None) == (correction.level is None)
        if weights is not None:
            options: dict[str, Any] = {"level": correction.level, "cap": correction.cap, "band": correction.band}
            torch.testing.assert_close(weights, importance_weights(**inputs, **options) * mask)
