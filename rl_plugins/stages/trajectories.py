"""Groups of samples on their way: to be asked for, being sampled, finished, and not yet trained on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_plugins.data.prompts import PromptBatch
from rl_plugins.rollout.engine import Generations, Held
from rl_plugins.stages.schedule import Schedule

_SLOT = 2**32


@dataclass(frozen=True)
class Group:
    """A prompt, and what has become of it.

    Attributes:
        prompt: a batch of this prompt alone.
        slot: the batch of prompts that it came with, counted from 0.
        place: in that batch of all ranks.
        begun: version of the policy with which its sampling began; None before that.
        generations: its responses, when they are finished, or where they are.
    """

    prompt: PromptBatch
    slot: int
    place: int
    begun: int | None = None
    generations: Generations | Held | None = None

    @property
    def number(self) -> int:
        """Of the group among all that a step may train on: a row may come twice."""
        return self.slot * _SLOT + self.prompt.rows[0]

    @property
    def sampled(self) -> Generations | Held:
        """The responses of a group that is finished."""
        assert self.generations is not None, "the group is not finished"
        return self.generations


def row_of(number: int) -> int:
    """The row in the data of the prompt of a group."""
    return number % _SLOT


class TrajectoryQueue:
    """The groups of one rank, by tickets that rise in the order in which they came.

    Args:
        schedule: what bounds them.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._groups: dict[int, Group] = {}
        self._tickets = 0

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    def __getitem__(self, ticket: int) -> Group:
        """Return a group by its ticket."""
        return self._groups[ticket]

    def offer(self, prompts: PromptBatch, *, slot: int, rank: int, world_size: int) -> None:
        """Take in this rank's prompts of a batch."""
        for position in range(len(prompts)):
            self.add(Group(single(prompts, position), slot, position * world_size + rank))

    def add(self, group: Group) -> int:
        """Take in a group; returns its ticket."""
        self._groups[self._tickets] = group
        self._tickets += 1
        return self._tickets - 1

    def begin(self, in_flight: int, version: int) -> list[int]:
        """The tickets of the groups to be asked for now, so that so many are on their way or finished."""
        waiting = [ticket for ticket, group in self._groups.items() if group.begun is None]
        chosen = waiting[: max(0, in_flight - (len(self) - len(waiting)))]
        self.begun_anew(chosen, version)
        return chosen

    def begun(self) -> list[int]:
        """Tickets of the groups whose sampling has begun."""
        return [ticket for ticket, group in self._groups.items() if group.begun is not None]

    def begun_anew(self, tickets: Iterable[int], version: int) -> None:
        """Their sampling begins now."""
        for ticket in tickets:
            self._groups[ticket] = replace(self._groups[ticket], begun=version)

    def finish(self, finished: Mapping[int, Generations | Held]) -> None:
        """Take in responses."""
        for ticket, generations in finished.items():
            self._groups[ticket] = replace(self._groups[ticket], generations=generations)

    def held(self) -> dict[int, Held]:
        """Those that are finished and still with their engines, by their tickets."""
        return {ticket: one.generations for ticket, one in self._groups.items() if isinstance(one.generations, Held)}

    def lose(self, tickets: Iterable[int]) -> None:
        """Their responses are gone: they are to be asked for anew."""
        for ticket in tickets:
            self._groups[ticket] = replace(self._groups[ticket], begun=None, generations=None)

    def due(self, version: int) -> list[int]:
        """Tickets of the groups that would be too stale for the step after this one."""
        if self._schedule.drops:
            return []
        last = version - self._schedule.max_staleness
        return [ticket for ticket, one in self._groups.items() if one.begun is not None and one.begun <= last]

    def unfinished(self, tickets: Iterable[int]) -> list[int]:
        """Those of them that are not finished."""
        return [ticket for ticket in tickets if self._groups[ticket].generations is None]

    @property
    def num_finished(self) -> int:
        """How many are finished."""
        return sum(group.generations is not None for group in self._groups.values())

    def take(self, count: int, version: int) -> list[Group]:
        """Take out so many finished groups: those that are due, and then the oldest; in the order of their tickets."""
        due = set(self.due(version))
        finished = [ticket for ticket, group in self._groups.items() if group.generations is not None]
        chosen = sorted(sorted(finished, key=lambda ticket: (ticket not in due, ticket))[:count])
        assert len(chosen) == count, f"{len(chosen)} groups are finished, and {count} are wanted"
        return self.take_out(chosen)

    def take_out(self, tickets: Iterable[int]) -> list[Group]:
        """Take out these groups."""
        return [self._groups.pop(ticket) for ticket in tickets]

    def begin_again(self) -> list[int]:
        """All groups are to be asked for anew; returns the tickets of those that had been."""
        begun = self.begun()
        groups = [replace(group, begun=None, generations=None) for group in self._groups.values()]
        self._groups.clear()
        for group in groups:
            self.add(group)
        return begun

    def drop_but(self, count: int) -> list[int]:
        """Forget all groups whose sampling has begun but so many finished ones; returns their tickets."""
        begun = self.begun()
        unfinished = set(self.unfinished(begun))
        kept = set([ticket for ticket in begun if ticket not in unfinished][:count])
        dropped = [ticket for ticket in begun if ticket not in kept]
        for ticket in dropped:
            del self._groups[ticket]
        return dropped

    # State ------------------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        """All groups, as `torch.save` can write them; none is with an engine."""
        return [
            {
                "prompt": {name: getattr(group.prompt, name) for name in PromptBatch.__slots__},
                "slot": group.slot,
                "place": group.place,
                "begun": group.begun,
                "generations": vars(group.generations) if isinstance(group.generations, Generations) else None,
            }
            for group in self._groups.values()
        ]

    def load(self, shares: Sequence[Sequence[Mapping[str, Any]]], rank: int, world_size: int, *, own: bool) -> str:
        """Take over this rank's share of what the ranks of a checkpoint held; says in words what that is.

        What was not finished is sampled from the start.

        Args:
            shares: the state of every rank of then, or this rank's own alone.
            rank: this one.
            world_size: ranks of now.
            own: it is this rank's own, as there were as many ranks as now.
        """
        held = sorted((group for share in shares for group in share), key=lambda one: (one["slot"], one["place"]))
        self._groups, self._tickets = {}, 0
        for state in held if own else held[rank::world_size]:
            generations = None if state["generations"] is None else Generations(**state["generations"])
            begun = None if generations is None else state["begun"]
            prompt = PromptBatch(**state["prompt"])
            self.add(Group(prompt, state["slot"], state["place"], begun, generations))
        return f"{len(self)} groups of each worker's queue, {self.num_finished} of them sampled"


def single(prompts: PromptBatch, position: int) -> PromptBatch:
    """One prompt of a batch."""
    columns = {name: [values[position]] for name, values in prompts.columns.items()}
    return PromptBatch([prompts.prompt_ids[position]], [prompts.rows[position]], columns, prompts.epoch)


def together(prompts: Sequence[PromptBatch]) -> PromptBatch:
    """The prompts of several batches; a column that one lacks is None there."""
    names = {name: None for batch in prompts for name in batch.columns}
    return PromptBatch(
        [ids for batch in prompts for ids in batch.prompt_ids],
        [row for batch in prompts for row in batch.rows],
        {name: [v for batch in prompts for v in batch.columns.get(name, [None] * len(batch))] for name in names},
        prompts[0].epoch,
    )
