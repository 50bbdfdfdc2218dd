"""Times of turns: sampling, work of the environment, and waits."""

from __future__ import annotations

from itertools import count
from unittest.mock import patch

import pytest

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.rewards import trajectory as trajectory_module
from rl_plugins.rewards.records import Score, ScoringRequest
from rl_plugins.rewards.trajectory import Reply, Trajectory
from rl_plugins.rewards.turn_times import TurnTimes, Work
from rl_plugins.rollout.engine import Generations
from rl_plugins.stages.turns import timed_turns


@pytest.mark.parametrize(
    ("work", "environment_s", "queue_s"),
    [
        ((), 10.0, 0.0),
        ((Work("add", 22.0, 3.0),), 3.0, 7.0),
        ((Work("add", 25.0, 3.0), Work("add", 22.0, 4.0), Work("add", 23.0, 1.0)), 6.0, 4.0),
        ((Work("agent", 15.0, 30.0),), 10.0, 0.0),
    ],
    ids=["not reported", "one call", "calls at once", "work before the response"],
)
def test_environment_s_is_the_time_with_work_and_queue_s_the_rest(
    work: tuple[Work, ...], environment_s: float, queue_s: float
) -> None:
    times = TurnTimes(0, 10.0, 20.0, 30.0, work)
    assert (times.sampling_s, times.environment_s, times.queue_s) == (10.0, environment_s, queue_s)


def test_trajectory_keeps_the_times_of_each_turn() -> None:
    response = Generations.from_responses([[3]], [[0.0]], ["stop"], 0)
    call = Work("add", 2.5, 0.25)
    with patch.object(trajectory_module, "unix_time", count(0.0).__next__):
        talk = Trajectory([1], ScoringRequest("", "", "", {}), SamplingConfig(max_tokens=40), (), 0)
        talk.ask()
        talk.respond([response], ["a"], 9)
        talk.observe(Reply([{"role": "tool", "content": "5", "by": object()}], [4], work=[call]))
        talk.ask()
        talk.respond([response], ["b"], 9)
        talk.end(Score(1.0))
    assert talk.ending is not None
    assert talk.ending.times == (TurnTimes(0, 1.0, 2.0, 3.0, (call,)), TurnTimes(2, 4.0, 5.0, 6.0))
    first, second = timed_turns(talk.ending)
    assert (first["messages"], first["response"], first["start"], first["end"]) == ([], "a", 1.0, 3.0)
    assert first["work"] == [{"name": "add", "start": 2.5, "seconds": 0.25}] and first["queue_s"] == 0.75
    assert (second["messages"], second["response"]) == ([{"role": "tool", "content": "5"}], "b")


def test_last_answer_after_a_reply_without_room_is_work_of_the_environment() -> None:
    response = Generations.from_responses([[3]], [[0.0]], ["stop"], 0)
    with patch.object(trajectory_module, "unix_time", count(0.0).__next__):
        talk = Trajectory([1], ScoringRequest("", "", "", {}), SamplingConfig(max_tokens=2), (), 0)
        talk.ask()
        talk.respond([response], ["a"], 9)
        assert not talk.observe(Reply([{"role": "tool", "content": "5"}], [4], work=[Work("add", 2.5, 0.25)]))
        talk.end(Score(1.0))
    assert talk.ending is not None
    (turn,) = talk.ending.times
    assert (turn.sampled, turn.answered) == (2.0, 4.0) and turn.work[1] == Work("environment", 3.0, 1.0)
    assert (turn.environment_s, turn.queue_s) == (1.25, 0.75)
