"""The queue of groups: groups to request, groups to wait for in a step, and the state in a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.config.sampling import Schedule
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import ConfigError
from rl_plugins.rollout.engine import Generations
from rl_plugins.stages.scheduled_sampler import GroupQueue, row_of
from rl_plugins.tests.loops import for_each


def batch(*rows: int) -> PromptBatch:
    return PromptBatch([[row, row] for row in rows], list(rows), {"data_source": [f"s{row}" for row in rows]}, 0)


def answer(token: int) -> Generations:
    return Generations.from_responses([[token]], [[-1.0]], ["stop"], 0)


def filled(schedule: Schedule, batches: int = 3, size: int = 2, rank: int = 0, world_size: int = 1) -> GroupQueue:
    queue = GroupQueue(schedule)
    for index in range(batches):
        prompts = batch(*(10 * index + place * world_size + rank for place in range(size)))
        queue.offer(prompts, batch_index=index, rank=rank, world_size=world_size)
    return queue


def rows(queue: GroupQueue, count: int, version: int) -> list[int]:
    return [group.prompt.rows[0] for group in queue.take(count, version)]


@for_each(
    ("schedule", "in_flight"),
    [
        (Schedule(), 8),
        (Schedule(1), 16),
        (Schedule(2), 24),
        (Schedule(2, ahead=0.25), 10),
        (Schedule(0, ahead=0.5), 12),
    ],
)
def test_schedule_in_flight_counts_the_groups_of_all_steps_ahead(schedule: Schedule, in_flight: int) -> None:
    assert schedule.in_flight(8) == in_flight


def test_schedule_in_flight_counts_at_least_one_group_ahead() -> None:
    assert [Schedule(1, ahead=0.25).in_flight(groups) for groups in (1, 2, 5)] == [2, 3, 7]


@for_each("wrong", [{"max_staleness": -1}, {"ahead": -0.1}, {"max_staleness": 2, "ahead": 3}, {"max_token_age": 1}])
def test_schedule_refuses_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^(max_staleness|ahead|max_token_age)=.*: must be"):
        Schedule(**wrong)


def test_take_is_first_in_first_out_with_max_staleness_1() -> None:
    queue = filled(Schedule(1))
    assert queue.start(4, version=0) == [0, 1, 2, 3]
    queue.finish({ticket: answer(ticket) for ticket in (3, 2, 1, 0)})
    assert queue.due(0, 2) == [0, 1]
    assert rows(queue, 2, version=0) == [0, 1]
    assert queue.start(4, version=1) == [4, 5]
    # Groups with a start under version 0 cannot wait for version 2.
    assert queue.due(1, 2) == [2, 3]


def test_unfinished_group_is_left_for_one_more_step() -> None:
    queue = filled(Schedule(1, ahead=0.5))
    queue.start(3, version=0)
    queue.finish({0: answer(0), 2: answer(2)})
    assert rows(queue, 2, version=0) == [0, 10]
    assert queue.start(3, version=1) == [3, 4]
    assert queue.due(1, 2) == [1]
    assert queue.unfinished(queue.due(1, 2)) == [1]
    queue.finish({3: answer(3), 4: answer(4), 1: answer(1)})
    # A group due in this step comes before finished groups due later.
    assert rows(queue, 2, version=1) == [1, 11]


def test_step_leaves_no_group_too_old_for_later_steps() -> None:
    """Two slow groups of version 0 may not both wait for step 3, which takes one group."""
    queue = filled(Schedule(3, ahead=2.0), batches=6, size=1)
    for version, newest in ((0, 2), (1, 3)):
        assert queue.start(3, version)[-1] == newest
        queue.finish({newest: answer(newest)})
        assert queue.leaves_time(version, 1, 1)
        assert rows(queue, 1, version) == [10 * newest]
    queue.start(3, version=2)
    queue.finish({4: answer(4)})
    assert not queue.leaves_time(2, 1, 1)
    queue.finish({1: answer(1)})
    assert queue.leaves_time(2, 1, 1)
    assert rows(queue, 1, version=2) == [10]
    queue.start(3, version=3)
    assert queue.due(3, 1) == [0]


def test_drop_started_forgets_unfinished_groups() -> None:
    queue = filled(Schedule(0, ahead=0.5))
    queue.start(3, version=0)
    queue.finish({1: answer(1), 2: answer(2)})
    assert queue.due(0, 2) == []
    assert queue.drop_started(keep=1) == [0, 2]
    assert rows(queue, 1, version=0) == [1]
    assert len(queue) == 3


def test_offer_makes_two_groups_of_the_same_row_in_two_batches() -> None:
    queue = GroupQueue(Schedule(1))
    for index in range(2):
        queue.offer(batch(7), batch_index=index, rank=0, world_size=1)
    queue.start(2, version=0)
    queue.finish({0: answer(0), 1: answer(1)})
    numbers = [group.number for group in queue.take(2, 0)]
    assert len(set(numbers)) == 2 and {row_of(number) for number in numbers} == {7}


def test_load_keeps_sampled_groups_and_starts_other_groups_again() -> None:
    queue = filled(Schedule(1))
    queue.start(4, version=5)
    queue.finish({1: answer(1)})
    again = GroupQueue(Schedule(1))
    again.load([queue.state()], rank=0, world_size=1, same_world_size=True)
    assert (len(again), again.num_finished) == (6, 1)
    assert again.start(6, version=6) == [0, 2, 3, 4, 5]
    assert again.due(6, 2) == [0, 1]
    kept = again[1].responses
    assert isinstance(kept, Generations) and kept.responses() == [[1]]
    assert [again[ticket].prompt.rows for ticket in range(6)] == [queue[ticket].prompt.rows for ticket in range(6)]


def test_reset_gives_all_groups_new_tickets() -> None:
    queue = filled(Schedule(1))
    queue.start(3, version=4)
    queue.finish({0: answer(0)})
    assert queue.reset() == [0, 1, 2]
    assert queue.num_finished == 0
    assert queue.start(6, version=2) == [6, 7, 8, 9, 10, 11]
    assert [queue[ticket].prompt.rows for ticket in range(6, 12)] == [[0], [1], [10], [11], [20], [21]]


@for_each(("earlier", "world_size"), [(2, 1), (2, 3), (1, 2), (1, 4)])
def test_load_on_another_number_of_ranks_distributes_all_groups_once(earlier: int, world_size: int) -> None:
    held = [filled(Schedule(1), rank=rank, world_size=earlier) for rank in range(earlier)]
    shares = [queue.state() for queue in held]
    new = [GroupQueue(Schedule(1)) for _ in range(world_size)]
    for rank, queue in enumerate(new):
        queue.load(shares, rank, world_size, same_world_size=False)
    dealt = [queue[ticket].prompt.rows[0] for queue in new for ticket in range(len(queue))]
    assert sorted(dealt) == sorted(row for share in shares for group in share for row in group["prompt"]["rows"])
