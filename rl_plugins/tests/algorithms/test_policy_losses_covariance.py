"""The tokens selected by the covariance losses: choice and number, for any ranks and any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.algorithms.masked import largest
from rl_plugins.algorithms.policy_losses.covariance import covariances, select_largest, select_within_band, stable_hash
from rl_plugins.tests.algorithms.batches import Batch, make_batch
from rl_plugins.tests.algorithms.simulated_ranks import run_on_ranks
from rl_plugins.tests.loops import for_each

IDS = torch.arange(100, 116)
SELECTIONS: list[tuple[Callable[..., Tensor], dict[str, Any]]] = [
    (select_within_band, {"share": 0.1, "low": 0.1, "high": 3.0}),
    (select_largest, {"share": 0.1}),
]


def inputs(batch: Batch, rows: Any = slice(None)) -> dict[str, Any]:
    return {
        "log_probs_BT": batch.old[rows],
        "advantages_BT": batch.advantages[rows],
        "response_mask_BT": batch.mask[rows],
    }


def by_loops(batch: Batch) -> np.ndarray:
    valid = batch.mask.numpy() > 0
    old, advantages = batch.old.numpy(), batch.advantages.numpy()
    result = np.zeros(valid.shape)
    for position in zip(*np.nonzero(valid), strict=True):
        result[position] = (advantages[position] - advantages[valid].mean()) * (old[position] - old[valid].mean())
    return result


def test_covariances_match_a_computation_by_hand() -> None:
    measured = covariances(
        log_probs_BT=torch.tensor([[-1.0, -3.0], [-2.0, torch.nan]]),
        advantages_BT=torch.tensor([[1.0, 1.0], [-5.0, torch.inf]]),
        response_mask_BT=torch.tensor([[1, 1], [1, 0]]),
    )
    # Means -2 and -1.
    assert measured.tolist() == [[2.0, -2.0], [0.0, 0.0]]


@for_each("seed", range(3))
def test_covariances_agree_with_plain_loops(seed: int) -> None:
    batch = make_batch(seed)
    np.testing.assert_allclose(covariances(**inputs(batch.with_garbage())).numpy(), by_loops(batch), atol=1e-12)


@for_each("seed", range(3))
@for_each("share", [1e-9, 0.05, 0.3, 1.0])
def test_select_largest_selects_the_largest_covariances(seed: int, share: float) -> None:
    batch = make_batch(seed)
    selected = select_largest(**inputs(batch.with_garbage()), ids_B=IDS, seed=0, share=share)
    valid, expected = batch.mask.bool(), torch.from_numpy(by_loops(batch))
    count = max(1, int(share * valid.sum().item()))
    assert selected.sum() == count and not selected[~valid].any()
    assert torch.equal(expected[selected].sort().values, expected[valid].topk(count).values.sort().values)


@for_each("seed", range(3))
@for_each("share", [1e-9, 0.05, 1.0])
def test_select_within_band_selects_tokens_within_the_band(seed: int, share: float) -> None:
    batch = make_batch(seed)
    options: dict[str, Any] = {"ids_B": IDS, "seed": 7, "share": share, "low": 0.1, "high": 1.0}
    selected = select_within_band(**inputs(batch.with_garbage()), **options)
    expected = torch.from_numpy(by_loops(batch))
    candidates = batch.mask.bool() & (expected > 0.1) & (expected < 1.0)
    assert selected.sum() == min(max(1, int(share * batch.mask.sum().item())), int(candidates.sum()))
    assert not selected[~candidates].any()
    assert share < 1.0 or torch.equal(selected, candidates)


def test_select_within_band_is_uniform_over_seeds() -> None:
    batch = make_batch(0)
    options: dict[str, Any] = {"share": 0.1, "low": 0.1, "high": 3.0}
    seeds = 2000
    choices = [select_within_band(**inputs(batch), ids_B=IDS, seed=seed, **options) for seed in range(seeds)]
    hits = torch.stack(choices).sum(dim=0)
    expected = torch.from_numpy(by_loops(batch))
    candidates = batch.mask.bool() & (expected > 0.1) & (expected < 3.0)
    probability = choices[0].sum().item() / candidates.sum().item()
    deviation = (seeds * probability * (1 - probability)) ** 0.5
    assert 0 < probability < 1
    assert (hits[candidates] - seeds * probability).abs().max() < 4.5 * deviation


@for_each(("select", "options"), SELECTIONS)
@for_each("ties", [False, True])
@for_each("sizes", [[16], [8, 8], [1, 0, 15], [4, 4, 4, 4]])
def test_selections_do_not_depend_on_ranks_and_order(
    select: Callable[..., Tensor], options: dict[str, Any], ties: bool, sizes: list[int]
) -> None:
    batch = make_batch(2)
    if ties:
        batch.old = torch.where(torch.arange(12) % 2 == 0, 0.0, -2.0).double().expand(16, 12).clone()
        batch.advantages = torch.where(torch.arange(16) % 2 == 0, 1.0, -1.0).double()[:, None].expand(16, 12).clone()
    expected = select(**inputs(batch), ids_B=IDS, seed=3, **options)
    assert 0 < expected.sum() < batch.mask.sum()
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    shards = order.split(sizes)

    def one_rank(rank: int, sum_over_ranks: Any, gather_over_ranks: Any) -> Tensor:
        rows = shards[rank]
        return select(
            **inputs(batch, rows),
            ids_B=IDS[rows],
            seed=3,
            sum_over_ranks=sum_over_ranks,
            gather_over_ranks=gather_over_ranks,
            **options,
        )

    assert torch.equal(torch.cat(run_on_ranks(len(sizes), one_rank)), expected[order])


def test_select_largest_selects_the_exact_number_among_ties() -> None:
    """Tokens of probability 1 in samples of equal advantage tie at the top."""
    log_probs = torch.zeros(4, 10)
    log_probs[:, 5:] = -1.0
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 10)
    batch: dict[str, Any] = {
        "log_probs_BT": log_probs,
        "advantages_BT": advantages,
        "response_mask_BT": torch.ones(4, 10),
    }
    choices = [select_largest(**batch, ids_B=IDS[:4], seed=seed, share=0.1) for seed in range(20)]
    # The covariance is 1/2 for tokens of probability 1 of good samples and for the other tokens of bad samples.
    assert all(choice.sum() == 4 for choice in choices)
    assert not any(choice[:2, 5:].any() or choice[2:, :5].any() for choice in choices)
    assert len({tuple(choice.flatten().tolist()) for choice in choices}) > 10


def test_select_largest_fills_up_with_ties_after_the_larger_covariances() -> None:
    advantages = torch.tensor([[5.0, 1.0, 1.0, 1.0, 1.0], [-1.0] * 5])
    log_probs = torch.tensor([[0.0] * 5, [-1.0] * 5])
    selected = select_largest(
        log_probs_BT=log_probs,
        advantages_BT=advantages,
        response_mask_BT=torch.tensor([[1] * 5, [1, 0, 0, 0, 0]]),
        ids_B=IDS[:2],
        seed=0,
        share=0.5,
    )
    assert selected[0, 0] and selected.sum() == 3


@for_each(("select", "options"), SELECTIONS)
def test_selections_do_not_depend_on_padding(select: Callable[..., Tensor], options: dict[str, Any]) -> None:
    batch = make_batch(4)
    wide = {name: torch.nn.functional.pad(value, (0, 5)) for name, value in inputs(batch).items()}
    expected = select(**inputs(batch), ids_B=IDS, seed=1, **options)
    selected = select(**wide, ids_B=IDS, seed=1, **options)
    assert torch.equal(selected[:, :12], expected) and not selected[:, 12:].any()


@for_each(("select", "options"), SELECTIONS)
def test_selections_without_valid_tokens_are_empty(select: Callable[..., Tensor], options: dict[str, Any]) -> None:
    batch = make_batch(0)
    batch.mask = torch.zeros_like(batch.mask)
    assert not select(**inputs(batch.with_garbage()), ids_B=IDS, seed=0, **options).any()
    empty = {name: value[:0] for name, value in inputs(batch).items()}
    assert select(**empty, ids_B=IDS[:0], seed=0, **options).shape == (0, 12)


@for_each("select", [select_within_band, select_largest])
@for_each("share", [0.0, -0.1, 1.1, float("nan")])
def test_selections_refuse_a_share_outside_0_to_1(select: Callable[..., Tensor], share: float) -> None:
    with pytest.raises(ValueError, match=f"share={share}: .*must be above 0 and at most 1"):
        select(**inputs(make_batch(0)), ids_B=IDS, seed=0, share=share)


def test_select_within_band_refuses_an_empty_band() -> None:
    with pytest.raises(ValueError, match=r"low=5.0, high=1.0: low must be below high"):
        select_within_band(**inputs(make_batch(0)), ids_B=IDS, seed=0, low=5.0, high=1.0)


def splitmix64_finalizer(bits: int) -> int:
    """splitmix64's finalizer in whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> shift)) * factor % 2**64
    return bits ^ (bits >> 31)


@given(seed=st.integers(-(2**70), 2**70), sample=st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=100)
def test_stable_hash_is_splitmix64(seed: int, sample: int) -> None:
    hashes = stable_hash(torch.tensor([sample]), 3, seed)[0].tolist()
    state = splitmix64_finalizer((sample % 2**64) ^ splitmix64_finalizer(seed % 2**64))
    expected = [splitmix64_finalizer((state + 0x9E3779B97F4A7C15 * position) % 2**64) for position in (1, 2, 3)]
    assert [value % 2**64 for value in hashes] == expected


@given(st.lists(st.lists(st.integers(-5, 5), max_size=6), min_size=1, max_size=4), st.integers(1, 12))
@settings(max_examples=50)
def test_largest_gathers_the_largest_values_of_all_ranks(shards: list[list[int]], count: int) -> None:
    sent: list[int] = []

    def one_rank(rank: int, _: Any, gather_over_ranks: Any) -> Tensor:
        def gather(values: Tensor) -> Tensor:
            sent.append(len(values))
            return gather_over_ranks(values)

        return largest(torch.tensor(shards[rank], dtype=torch.int64), count, gather)

    expected = sorted((value for shard in shards for value in shard), reverse=True)[:count]
    assert all(values.tolist() == expected for values in run_on_ranks(len(shards), one_rank))
    assert max(sent) <= count
