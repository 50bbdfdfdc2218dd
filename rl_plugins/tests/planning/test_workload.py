"""Planned micro-batches against the micro-batches of `Cutter`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from rl_plugins.planning.shape import ModelShape
from rl_plugins.planning.workload import Workload, micro_batch_budgets, micro_batch_sizes
from rl_plugins.stages.micro_batches import Cutter, Lengths
from rl_plugins.tests.cases import case

SHAPE = ModelShape(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=4, head_dim=16, vocab=1000, norms=128)
WORK = Workload(SHAPE, prompts=16, samples=4, prompt_tokens=64, response_tokens=128, max_tokens=192)


def test_micro_batch_sizes_agrees_with_the_micro_batches_of_cutter() -> None:
    for budget, updates in product((192, 320, 500, 576, 600, 1152, 1536, 1728, 10_000), (1, 2)):
        with case(f"{budget} tokens per micro-batch, {updates} updates"):
            check_sizes(budget, updates)


def check_sizes(budget: int, updates: int) -> None:
    found = micro_batch_sizes(replace(WORK, micro_batch_tokens=budget, updates=updates), trainers=2)
    groups = 8 // updates
    prompts, first = torch.full((groups * 4,), 64), (torch.arange(groups * 4) // 4) * 4
    lengths = Lengths(prompts, prompts * 2, prompts * 3, first)
    cut = Cutter(budget, packing=True, shares_prompts=True, max_over_ranks=lambda largest: largest).indices(lengths)
    tokens = [64 * len(set(first[part].tolist())) + 128 * len(part) for part in cut]
    assert found.passes == len(cut) * updates
    assert found.largest == max(tokens)
    assert found.tokens == sum(tokens) * updates
    # Attention keeps the keys of whole samples.
    assert found.copies * found.tokens == pytest.approx(8 * 4 * 192)
    prompts_run = found.tokens / 64 - 2 * 8 * 4
    assert found.context * found.tokens == pytest.approx(prompts_run * 64 * 32 + 8 * 4 * 128 * 128)


def test_micro_batch_budgets_have_room_for_some_samples_of_a_prompt() -> None:
    work = replace(WORK, samples=6, prompts=2, micro_batch_tokens=1000)
    budgets = micro_batch_budgets(work)
    assert 1000 in budgets
    # A prompt of 64 tokens, responses of 128, and an eighth of the prompt for each further sample.
    assert set(budgets) - {1000} == {64 + 128, 64 + 2 * 128 + 8, 64 + 4 * 128 + 24, 64 + 6 * 128 + 40}
    largest = {
        budget: micro_batch_sizes(replace(work, micro_batch_tokens=budget), trainers=2).largest for budget in budgets
    }
    assert largest[64 + 2 * 128 + 8] == 64 + 2 * 128 and largest[64 + 6 * 128 + 40] == 64 + 6 * 128
    smaller = replace(work, micro_batch_tokens=64 + 6 * 128 + 39)
    assert micro_batch_sizes(smaller, trainers=2).largest < 64 + 6 * 128


def test_micro_batch_sizes_runs_the_prompt_of_a_lone_sample_once() -> None:
    alone = micro_batch_sizes(replace(WORK, samples=1), trainers=2)
    assert (alone.tokens, alone.copies, alone.context) == (8 * 192, 1, 96)
    # One sample may be longer than the others are on average.
    assert micro_batch_sizes(replace(WORK, micro_batch_tokens=1, max_tokens=1000), trainers=16).largest == 1000


def test_micro_batch_sizes_without_packing_run_the_prompt_for_each_sample() -> None:
    sizes = micro_batch_sizes(replace(WORK, packing=False), trainers=2)
    prompts = WORK.prompts / 2
    assert sizes.tokens == prompts * WORK.samples * WORK.sample_tokens
    assert (sizes.copies, sizes.prompts, sizes.context) == (1, prompts * WORK.samples, WORK.sample_tokens / 2)
