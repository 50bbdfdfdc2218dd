"""Properties of every advantage estimator, for any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.tests.algorithms.advantage_cases import (
    BY_POSITION,
    CASES,
    OVER_THE_BATCH,
    Inputs,
    estimate,
    make_inputs,
    select,
)
from rl_plugins.tests.algorithms.simulated_ranks import run_on_ranks
from rl_plugins.tests.loops import for_each

SEEDS = range(4)


def test_advantage_cases_contain_every_estimator() -> None:
    assert {name for name, _, _ in CASES.values()} == set(ADVANTAGES)


@for_each("case", CASES)
@for_each("seed", SEEDS)
def test_advantages_are_zero_at_masked_positions_and_for_invalid_samples(case: str, seed: int) -> None:
    inputs = make_inputs(case, seed)
    learned = inputs["response_mask_BT"].bool() & inputs["valid_B"][:, None]
    for tensor in estimate(case, inputs):
        assert tensor.isfinite().all()
        assert (tensor[~learned] == 0).all()
        assert tensor[learned].any()


@for_each("case", CASES)
@for_each("garbage", [torch.nan, torch.inf, -torch.inf])
def test_advantages_ignore_values_at_masked_positions(case: str, garbage: float) -> None:
    inputs = make_inputs(case, 3)
    learned = inputs["response_mask_BT"].bool() & inputs["valid_B"][:, None]
    dirty = dict(inputs)
    for name, tensor in inputs.items():
        if name == "token_level_rewards_BT" and CASES[case][0] not in BY_POSITION:
            dirty[name] = tensor.masked_fill(~inputs["valid_B"][:, None], garbage)
        elif name.endswith("_BT") and name != "response_mask_BT":
            dirty[name] = tensor.masked_fill(~learned, garbage if tensor.is_floating_point() else 7)
        elif name in ("component_rewards_BK", "baseline_rewards_B"):
            dirty[name] = tensor.clone()
            dirty[name][~inputs["valid_B"]] = garbage
    for clean, soiled in zip(estimate(case, inputs), estimate(case, dirty), strict=True):
        assert torch.equal(clean, soiled)


@for_each("case", CASES)
@for_each("seed", SEEDS)
def test_advantages_do_not_change_without_the_invalid_samples(case: str, seed: int) -> None:
    inputs = make_inputs(case, seed)
    valid = inputs["valid_B"].nonzero().flatten()
    for all_samples, only_valid in zip(estimate(case, inputs), estimate(case, select(inputs, valid)), strict=True):
        torch.testing.assert_close(all_samples[valid], only_valid, rtol=1e-12, atol=1e-12)


@for_each("case", CASES)
@for_each("seed", SEEDS)
def test_advantages_do_not_depend_on_the_order_of_samples(case: str, seed: int) -> None:
    inputs = make_inputs(case, seed)
    order = torch.randperm(len(inputs["groups_B"]), generator=torch.Generator().manual_seed(seed))
    for straight, permuted in zip(estimate(case, inputs), estimate(case, select(inputs, order)), strict=True):
        torch.testing.assert_close(permuted, straight[order], rtol=1e-9, atol=1e-9)


@for_each("case", CASES)
@for_each("groups_of_rank_0", [(5, 90), (), (1, 2, 3, 5, 7, 90), (3,)])
def test_advantages_on_two_ranks_equal_advantages_on_one_rank(case: str, groups_of_rank_0: tuple[int, ...]) -> None:
    """The property also holds for a rank without valid samples, and for ranks padded to different widths."""
    inputs = make_inputs(case, 1)
    together = estimate(case, inputs)
    on_rank_0 = torch.isin(inputs["groups_B"], torch.tensor(groups_of_rank_0, dtype=torch.long))
    samples = [on_rank_0.nonzero().flatten(), (~on_rank_0).nonzero().flatten()]

    def on_rank(rank: int, sum_over_ranks: Any, _: Any) -> tuple[Tensor, Tensor]:
        part = select(inputs, samples[rank])
        if rank == 1:
            part = {name: pad(tensor) if name.endswith("_BT") else tensor for name, tensor in part.items()}
        return estimate(case, part, sum_over_ranks=sum_over_ranks)

    def pad(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, 3))

    width = inputs["response_mask_BT"].shape[1]
    for rank, parts in enumerate(run_on_ranks(2, on_rank)):
        for part, whole in zip(parts, together, strict=True):
            torch.testing.assert_close(part[:, :width], whole[samples[rank]], rtol=1e-10, atol=1e-12)
            assert not part[:, width:].any()


@for_each("case", sorted(set(CASES) - OVER_THE_BATCH))
def test_advantages_without_batch_statistics_ignore_other_groups(case: str) -> None:
    inputs = make_inputs(case, 2)
    samples = (inputs["groups_B"] == 5).nonzero().flatten()
    for whole, alone in zip(estimate(case, inputs), estimate(case, select(inputs, samples)), strict=True):
        torch.testing.assert_close(alone, whole[samples], rtol=1e-12, atol=1e-12)


@for_each("case", CASES)
def test_advantages_have_the_dtype_of_the_rewards(case: str) -> None:
    inputs = make_inputs(case, 0)
    halves = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    for exact, single in zip(estimate(case, inputs), estimate(case, halves), strict=True):
        assert single.dtype == torch.float32
        torch.testing.assert_close(single.double(), exact, rtol=1e-3, atol=1e-4)
    halves["response_mask_BT"] = halves["response_mask_BT"].bool()
    assert estimate(case, halves)[0].dtype == torch.float32


@for_each("case", CASES)
def test_advantages_are_zero_for_empty_responses(case: str) -> None:
    inputs = make_inputs(case, 0)
    inputs["response_mask_BT"] = torch.zeros_like(inputs["response_mask_BT"])
    for tensor in estimate(case, inputs):
        assert not tensor.any()


@for_each("case", CASES)
def test_advantages_are_zero_without_valid_samples(case: str) -> None:
    inputs = make_inputs(case, 0)
    inputs["valid_B"] = torch.zeros_like(inputs["valid_B"])
    for tensor in estimate(case, inputs):
        assert not tensor.any()


CENTRED = ["grpo", "grpo, batch", "grpo, none", "rloo", "gpg", "max_rl"]
"""Cases whose advantages sum to 0 over a group of two samples or more."""

SHIFT_INVARIANT = ["grpo", "grpo, batch", "grpo, none", "grpo_passk, plain", "grpo_passk", "rloo", "opo", "gdpo"]
"""Cases without effect of a constant added to the rewards of a group (`grpo, batch`: of all groups)."""

ZERO_FOR_EQUAL_REWARDS = [*CENTRED, "grpo_passk", "grpo_passk, plain", "opo", "gdpo", "reinforce_plus_plus_baseline"]


def one_token_each(nested: list[list[float]], lengths: int = 1, dtype: torch.dtype = torch.float64) -> Inputs:
    rewards = torch.tensor([reward for group in nested for reward in group], dtype=dtype)
    mask = torch.ones(len(rewards), lengths, dtype=dtype)
    return {
        "token_level_rewards_BT": torch.nn.functional.pad(rewards[:, None], (lengths - 1, 0)),
        "response_mask_BT": mask,
        "groups_B": torch.tensor([g for g, group in enumerate(nested) for _ in group]),
        "valid_B": torch.ones(len(rewards), dtype=torch.bool),
    }


# Multiples of 1/8: sums and differences are exact, and every difference is an error of the estimator.
eighths = st.integers(-800, 800).map(lambda n: n / 8)
groups_of_rewards = st.lists(st.lists(eighths, min_size=2, max_size=6), min_size=1, max_size=5)


@settings(max_examples=40)
@given(nested=groups_of_rewards)
@for_each("case", CENTRED)
def test_centred_advantages_sum_to_zero_over_a_group(case: str, nested: list[list[float]]) -> None:
    if case == "max_rl":
        nested = [[abs(reward) for reward in group] for group in nested]
    inputs = one_token_each(nested)
    advantages = estimate(case, inputs)[0][:, 0]
    for group in range(len(nested)):
        of_group = advantages[inputs["groups_B"] == group]
        assert abs(float(of_group.sum())) <= 1e-9 * (1 + float(of_group.abs().max()))


@settings(max_examples=40)
@given(nested=groups_of_rewards)
def test_opo_advantages_sum_to_zero_over_the_tokens_of_a_group(nested: list[list[float]]) -> None:
    inputs = one_token_each(nested, lengths=5)
    lengths = torch.arange(len(inputs["groups_B"])) % 5 + 1
    inputs["response_mask_BT"] = (torch.arange(5) < lengths[:, None]).double()
    sums = estimate("opo", inputs)[0].sum(dim=-1)
    for group in range(len(nested)):
        assert abs(float(sums[inputs["groups_B"] == group].sum())) < 1e-9


@settings(max_examples=40)
@given(nested=groups_of_rewards, shifts=st.lists(st.integers(-1000, 1000), min_size=5, max_size=5))
@for_each("case", SHIFT_INVARIANT)
def test_shift_invariant_advantages_ignore_a_constant_added_to_a_group(
    case: str, nested: list[list[float]], shifts: list[int]
) -> None:
    if case == "grpo, batch":
        shifts = [shifts[0]] * len(nested)
    shifted = [[reward + shift for reward in group] for group, shift in zip(nested, shifts, strict=False)]
    torch.testing.assert_close(
        estimate(case, one_token_each(shifted))[0], estimate(case, one_token_each(nested))[0], rtol=1e-8, atol=1e-8
    )


@settings(max_examples=40)
@given(nested=groups_of_rewards, factor=st.integers(1, 1000))
def test_max_rl_advantages_do_not_change_with_a_common_factor(nested: list[list[float]], factor: int) -> None:
    nested = [[abs(reward) for reward in group] for group in nested]
    scaled = [[factor * reward for reward in group] for group in nested]
    torch.testing.assert_close(
        estimate("max_rl", one_token_each(scaled))[0],
        estimate("max_rl", one_token_each(nested))[0],
        rtol=1e-4,
        atol=1e-4,
    )


@for_each("case", ZERO_FOR_EQUAL_REWARDS)
@for_each("dtype", [torch.float32, torch.float64])
@for_each("size", [2, 3, 7, 16])
@for_each("reward", [0.1, 0.7, 1e6 + 0.1])
def test_advantages_of_equal_rewards_are_exactly_zero(case: str, dtype: torch.dtype, size: int, reward: float) -> None:
    nested = [[reward] * size, [reward] * size]
    assert not estimate(case, one_token_each(nested, lengths=3, dtype=dtype))[0].any()


@for_each("case", ["grpo", "grpo, none", "rloo", "opo", "grpo_passk", "max_rl"])
def test_a_group_of_one_sample_has_the_reward_or_zero_as_advantage(case: str) -> None:
    advantages = estimate(case, one_token_each([[2.5], [1.0, 1.0]]))[0][:, 0]
    expected = 0.0 if case in ("grpo_passk", "max_rl") else 2.5
    assert advantages.tolist() == pytest.approx([expected, 0, 0], abs=1e-5)
