"""Turns and states of conversations as tensors."""

from __future__ import annotations

from rl_plugins.data.experience import Experience, computed
from rl_plugins.rewards.records import Message, Score
from rl_plugins.rewards.trajectory import Ending
from rl_plugins.rewards.turn_times import TurnTimes
from rl_plugins.stages.turns import add_turns


def states(said: list[Message], places: list[int]) -> list[int]:
    """Return the state of each turn, given the places of the policy's messages. A turn has one token."""
    times = tuple(TurnTimes(place, 0.0, 1.0, 2.0) for place in places)
    count = len(places)
    ending = Ending(Score(1.0), said, 0, count, prompt_ids=(5,), turn_ends=tuple(range(count)), times=times)
    samples = Experience.from_responses([[5]], [[7] * count], 0)
    samples.set_column("ending", [ending])
    add_turns(samples)
    assert computed(samples.turns)[0].tolist() == list(range(count))
    return computed(samples.states)[0].tolist()


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def test_a_message_of_the_policy_that_the_agent_repeats_is_no_turn() -> None:
    answers, asks = message("assistant", "a"), message("user", "b")
    first, second = states([answers, asks, answers, asks, answers], [0, 4])
    assert second not in (first, *states([answers, asks, answers], [0, 2])[1:])
    assert second == states([answers, asks, answers, asks, message("assistant", "c")], [0, 4])[1]
