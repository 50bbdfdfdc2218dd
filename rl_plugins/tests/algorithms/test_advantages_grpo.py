"""GRPO's advantages against plain loops, and their properties for any rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.algorithms.advantages import grpo
from rl_plugins.algorithms.inputs import one_rank
from rl_plugins.tests.algorithms.batches import make_batch
from rl_plugins.tests.algorithms.reference import basics as reference
from rl_plugins.tests.loops import for_each

SCALES = ("group", "batch", "none")


def advantages_of(
    rewards: list[float],
    groups: list[int],
    scale: Any = "none",
    sum_over_ranks: Callable[[Tensor], Tensor] = one_rank,
) -> Tensor:
    """One token per sample, float64 [B]."""
    advantages, _ = grpo(
        token_level_rewards_BT=torch.tensor(rewards, dtype=torch.float64)[:, None],
        response_mask_BT=torch.ones(len(rewards), 1, dtype=torch.float64),
        groups_B=torch.tensor(groups),
        valid_B=torch.ones(len(rewards), dtype=torch.bool),
        scale=scale,
        sum_over_ranks=sum_over_ranks,
    )
    return advantages[:, 0]


@for_each("scale", SCALES)
@for_each("seed", range(10))
def test_grpo_agrees_with_plain_loops(seed: int, scale: Any) -> None:
    batch = make_batch(seed)
    rewards = batch.rewards() + 0.1 * batch.advantages * batch.mask  # Not only on the last token.
    advantages, returns = grpo(
        token_level_rewards_BT=rewards,
        response_mask_BT=batch.mask,
        groups_B=batch.groups,
        valid_B=batch.valid,
        scale=scale,
    )
    expected = reference.grpo(rewards.numpy(), batch.mask.numpy(), batch.groups.numpy(), batch.valid.numpy(), scale)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(returns, advantages)


@for_each("scale", SCALES)
def test_grpo_ignores_invalid_samples(scale: Any) -> None:
    batch = make_batch(3)
    dirty = batch.with_garbage()
    clean, soiled = (
        grpo(
            token_level_rewards_BT=version.rewards(),
            response_mask_BT=version.mask,
            groups_B=version.groups,
            valid_B=version.valid,
            scale=scale,
        )[0]
        for version in (batch, dirty)
    )
    assert soiled.isfinite().all()
    assert torch.equal(clean, soiled)
    assert (clean[~batch.valid] == 0).all()


@for_each("size", range(2, 17))
@for_each("reward", [0.1, -0.3, 0.7, 1e6 + 0.1])
@for_each("dtype", [torch.float32, torch.float64])
def test_grpo_gives_zero_to_groups_of_equal_rewards(size: int, reward: float, dtype: torch.dtype) -> None:
    """The rounding error of a mean, divided by a standard deviation of 0 + eps, would be a gradient."""
    mask = torch.ones(2 * size, 3, dtype=dtype)
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = reward
    rewards[size:, -1] = torch.arange(size)
    advantages, _ = grpo(
        token_level_rewards_BT=rewards,
        response_mask_BT=mask,
        groups_B=torch.arange(2).repeat_interleave(size),
        valid_B=torch.ones(2 * size, dtype=torch.bool),
    )
    assert (advantages[:size] == 0).all()
    assert advantages[size:].any()


def test_grpo_counts_a_score_on_an_observation_token() -> None:
    """R sums over all positions: a response cut off after an observation is scored on a masked token."""
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    rewards = torch.tensor([[0.0, 3.0], [0.0, 1.0]])
    advantages, _ = grpo(
        token_level_rewards_BT=rewards,
        response_mask_BT=mask,
        groups_B=torch.tensor([0, 0]),
        valid_B=torch.tensor([True, True]),
        scale="none",
    )
    assert advantages.tolist() == [[1.0, 0.0], [-1.0, -1.0]]


def test_grpo_gives_a_group_of_one_sample_the_reward() -> None:
    assert advantages_of([2.5, 1.0, 3.0], [4, 7, 7]).tolist() == [2.5, -1.0, 1.0]
    assert advantages_of([2.5], [0], "batch").tolist() == pytest.approx([2.5], abs=1e-5)


def test_grpo_batch_scale_uses_the_samples_of_all_ranks() -> None:
    rewards, groups = [0.0, 1.0, 5.0, 2.0, 2.5, -3.0], [0, 0, 1, 1, 2, 2]
    together = advantages_of(rewards, groups, "batch")
    values = torch.tensor(rewards, dtype=torch.float64)
    # The results of the two sums over ranks: sum and number of rewards, then squared deviations.
    totals = [
        torch.stack([values.sum(), torch.tensor(6.0).double()]),
        (values - values.mean()).square().sum(),
    ]
    parts = []
    for rank in (slice(0, 2), slice(2, 6)):
        answers = iter(totals)

        def of_all_ranks(_: Tensor, answers: Iterator[Tensor] = answers) -> Tensor:
            return next(answers)

        parts.append(advantages_of(rewards[rank], groups[rank], "batch", of_all_ranks))
    torch.testing.assert_close(torch.cat(parts), together, rtol=1e-12, atol=0)


def test_grpo_refuses_an_unknown_scale() -> None:
    with pytest.raises(ValueError, match=r"scale='std'.*'group', 'batch' or 'none'"):
        advantages_of([1.0, 2.0], [0, 0], "std")


groups_of_rewards = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6), min_size=1, max_size=5)


def flatten(nested: list[list[float]]) -> tuple[list[float], list[int]]:
    return [r for part in nested for r in part], [g for g, part in enumerate(nested) for _ in part]


@given(groups_of_rewards)
def test_grpo_advantages_sum_to_zero_over_a_group(nested: list[list[float]]) -> None:
    rewards, groups = flatten(nested)
    advantages = advantages_of(rewards, groups)
    for group in range(len(nested)):
        assert abs(float(advantages[torch.tensor(groups) == group].sum())) < 1e-9


@given(groups_of_rewards, st.data(), st.sampled_from(["none", "group"]))
def test_grpo_advantages_do_not_change_with_a_constant_added_to_a_group(
    nested: list[list[float]], data: st.DataObject, scale: Any
) -> None:
    rewards, groups = flatten(nested)
    shifts = data.draw(st.lists(st.integers(-1000, 1000), min_size=len(nested), max_size=len(nested)))
    # Small multiples of 1/8: the shifted rewards are exact, and every difference is an error of the estimator.
    rewards = [round(reward * 8) / 8 for reward in rewards]
    shifted = [reward + shifts[group] for reward, group in zip(rewards, groups, strict=True)]
    torch.testing.assert_close(
        advantages_of(shifted, groups, scale), advantages_of(rewards, groups, scale), rtol=1e-9, atol=1e-9
    )


@given(groups_of_rewards, st.randoms(use_true_random=False), st.sampled_from(SCALES))
def test_grpo_advantages_do_not_depend_on_the_order_of_samples(
    nested: list[list[float]], random: Random, scale: Any
) -> None:
    rewards, groups = flatten(nested)
    order = list(range(len(rewards)))
    random.shuffle(order)
    permuted = advantages_of([rewards[i] for i in order], [groups[i] for i in order], scale)
    # A standard deviation near eps magnifies the rounding errors, so the tolerance is wider.
    torch.testing.assert_close(permuted, advantages_of(rewards, groups, scale)[order], rtol=1e-6, atol=1e-7)
