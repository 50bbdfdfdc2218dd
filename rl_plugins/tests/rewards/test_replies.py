"""TurnScoring: an environment goes on while a pool of workers scores."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event
from typing import Any

import pytest

from rl_plugins.errors import DataError
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.replies import TurnScoring
from rl_plugins.tests.patience import patient


class SlowPool(RewardPool):
    """A pool whose calls end when the test lets each end."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.ends = [Event() for _ in range(3)]
        self.fault: Exception | None = None

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        self.calls.append(len(requests))
        assert self.ends[len(self.calls) - 1].wait(patient(20))
        if self.fault is not None:
            raise self.fault
        return [Score(float(request.solution_str)) for request in requests]


def add(scoring: TurnScoring, *keys: int) -> None:
    for key in keys:
        turn: Any = f"turn {key}"
        scoring.add(key, turn, ScoringRequest("source", str(key), None, {}))


def test_take_returns_at_once_while_a_pool_scores() -> None:
    pool = SlowPool()
    scoring = TurnScoring(pool)
    assert scoring.take(0.0) == [] and not scoring.is_running
    add(scoring, 1, 2)
    assert scoring.take(0.0) == [] and scoring.is_running
    add(scoring, 3, 4)
    assert scoring.take(0.0) == []
    scoring.forget([2, 3])
    pool.ends[0].set()
    assert [(key, score.value) for key, _, score in scoring.take(patient(20))] == [(1, 1.0)]
    # The next call has begun.
    assert scoring.is_running
    pool.ends[1].set()
    assert [(key, score.value) for key, _, score in scoring.take(patient(20))] == [(4, 4.0)]
    assert pool.calls == [2, 1] and not scoring.is_running


def test_take_raises_the_error_of_a_pool() -> None:
    pool = SlowPool()
    scoring = TurnScoring(pool)
    pool.fault = DataError("no reward for the source")
    pool.ends[0].set()
    add(scoring, 1)
    with pytest.raises(DataError, match="no reward for the source"):
        scoring.take(patient(20))
    assert not scoring.is_running


def test_take_scores_at_once_without_a_pool() -> None:
    scoring = TurnScoring(InlineScorer({"_target_": "rl_plugins.tests.rewards.sample_rewards.length"}))
    add(scoring, 12)
    ((key, _, score),) = scoring.take(0.0)
    assert (key, score.value) == (12, 2.0)


def test_lost_worker_is_replaced_for_later_calls() -> None:
    """The thread of a call ends before the new worker is needed."""
    reward = {"_target_": "rl_plugins.tests.rewards.sample_rewards.die_on_bad"}
    with RewardPool(
        reward,
        num_workers=2,
        deadline_s=patient(60),
        chunk_size=1,
        max_failure_rate=1.0,
        start_timeout_s=patient(60),
    ) as pool:
        scoring = TurnScoring(pool)
        for keys in ((1, 2), (3, 4), (5, 6)):
            for key in keys:
                turn: Any = f"turn {key}"
                text = "bad" if key == 1 else "good"
                scoring.add(key, turn, ScoringRequest("source", text, None, {}))
            found: dict[int, Score] = {}
            while len(found) < len(keys):
                found |= {key: score for key, _, score in scoring.take(patient(60))}
            assert [found[key].failure for key in keys] == ["died" if key == 1 else None for key in keys]


def test_closed_pool_starts_no_worker() -> None:
    pool = RewardPool({"_target_": "rl_plugins.tests.rewards.sample_rewards.length"}, num_workers=1, deadline_s=60.0)
    pool.close()
    with pytest.raises(RuntimeError, match="the reward pool is closed"):
        pool.answer([ScoringRequest("source", "a", None, {})])
