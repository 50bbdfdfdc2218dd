"""assigned_range and split_prompts: the engines of a rank, and the prompts of each engine."""

from __future__ import annotations

from collections import Counter

import pytest

from rl_plugins.rollout.vllm.fleet import assigned_range, split_prompts

pytestmark = pytest.mark.unit

NUMBERS = [(1, 1), (2, 1), (1, 3), (4, 2), (4, 3), (3, 5), (7, 4)]


def test_assigned_range_is_symmetric_and_covers_every_rank_and_engine() -> None:
    for ranks, engines in NUMBERS:
        one_way = {(rank, engine) for rank in range(ranks) for engine in assigned_range(rank, ranks, engines)}
        other_way = {(rank, engine) for engine in range(engines) for rank in assigned_range(engine, engines, ranks)}
        assert one_way == other_way, (ranks, engines)
        assert {rank for rank, _ in one_way} == set(range(ranks)), (ranks, engines)
        assert {engine for _, engine in one_way} == set(range(engines)), (ranks, engines)


def test_split_prompts_gives_every_prompt_one_engine_and_engines_equal_loads() -> None:
    for ranks, engines in NUMBERS:
        for count in (0, 1, 5, 12):
            case = f"{ranks} ranks, {engines} engines, {count} prompts"
            of_engine: Counter[int] = Counter()
            for rank in range(ranks):
                parts = split_prompts(rank, ranks, engines, count)
                assert list(parts) == list(assigned_range(rank, ranks, engines)), case
                assert [prompt for part in parts.values() for prompt in part] == list(range(count)), case
                of_engine.update({engine: len(part) for engine, part in parts.items()})
            if count == 12:
                assert max(of_engine.values()) - min(of_engine.values()) <= 2, case
