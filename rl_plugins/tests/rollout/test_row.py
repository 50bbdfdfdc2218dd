"""Ranks beside engines, for any two numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from rl_plugins.rollout.vllm.row import beside, shares

pytestmark = pytest.mark.unit

NUMBERS = [(1, 1), (2, 1), (1, 3), (4, 2), (4, 3), (3, 5), (7, 4)]


@pytest.mark.parametrize(("ranks", "engines"), NUMBERS)
def test_both_rows_agree_on_who_lies_beside_whom(ranks: int, engines: int) -> None:
    one_way = {(rank, engine) for rank in range(ranks) for engine in beside(rank, ranks, engines)}
    other_way = {(rank, engine) for engine in range(engines) for rank in beside(engine, engines, ranks)}
    assert one_way == other_way
    assert {rank for rank, _ in one_way} == set(range(ranks))
    assert {engine for _, engine in one_way} == set(range(engines))


@pytest.mark.parametrize(("ranks", "engines"), NUMBERS)
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_every_prompt_has_one_engine_and_engines_have_about_as_many(ranks: int, engines: int, count: int) -> None:
    of_engine: Counter[int] = Counter()
    for rank in range(ranks):
        parts = shares(rank, ranks, engines, count)
        assert list(parts) == list(beside(rank, ranks, engines))
        assert [prompt for part in parts.values() for prompt in part] == list(range(count))
        of_engine.update({engine: len(part) for engine, part in parts.items()})
    if count == 12:
        assert max(of_engine.values()) - min(of_engine.values()) <= 2
