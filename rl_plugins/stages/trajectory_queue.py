"""Queue of groups of samples until a step trains on a group. A group waits, is being sampled, or is finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_plugins.config.sampling import Schedule
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.rollout.engine import Generations, RemoteSamples

_BATCH = 2**32


@dataclass(frozen=True)
class Group:
    """A prompt and its responses.

    Attributes:
        prompt: batch of this prompt alone.
        batch_index: index of the batch of prompts, from 0.
        position: index of the prompt in the batch of all ranks.
        begun: version of the policy when its sampling began; None while the group waits.
        generations: responses of a finished group, or a reference to the responses in an engine.
    """

    prompt: PromptBatch
    batch_index: int
    position: int
    begun: int | None = None
    generations: Generations | RemoteSamples | None = None

    @property
    def number(self) -> int:
        """Number of the group among all groups of a run. A row of the data may be in several groups."""
        return self.batch_index * _BATCH + self.prompt.rows[0]

    @property
    def responses(self) -> Generations | RemoteSamples:
        """Responses of a finished group."""
        assert self.generations is not None, "the group is not finished"
        return self.generations


def row_of(number: int) -> int:
    """Return the row in the data of the prompt of a group."""
    return number % _BATCH


class TrajectoryQueue:
    """The groups of one rank, by tickets: rising numbers in the order of arrival.

    Args:
        schedule: bounds on staleness and on groups in flight.
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

    def offer(self, prompts: PromptBatch, *, batch_index: int, rank: int, world_size: int) -> None:
        """Add a group for each of this rank's prompts of a batch."""
        for index in range(len(prompts)):
            self.add(Group(single(prompts, index), batch_index, index * world_size + rank))

    def add(self, group: Group) -> int:
        """Add a group; return its ticket."""
        self._groups[self._tickets] = group
        self._tickets += 1
        return self._tickets - 1

    def start(self, in_flight: int, version: int) -> list[int]:
        """Mark waiting groups as started until `in_flight` groups are started or finished; return the tickets."""
        waiting = [ticket for ticket, group in self._groups.items() if group.begun is None]
        chosen = waiting[: max(0, in_flight - (len(self) - len(waiting)))]
        self.mark_started(chosen, version)
        return chosen

    def started(self) -> list[int]:
        """Return the tickets of groups that are being sampled or finished."""
        return [ticket for ticket, group in self._groups.items() if group.begun is not None]

    def mark_started(self, tickets: Iterable[int], version: int) -> None:
        """Mark groups as started with a version of the policy."""
        for ticket in tickets:
            self._groups[ticket] = replace(self._groups[ticket], begun=version)

    def finish(self, finished: Mapping[int, Generations | RemoteSamples]) -> None:
        """Store the responses of groups."""
        for ticket, generations in finished.items():
            self._groups[ticket] = replace(self._groups[ticket], generations=generations)

    def remote(self) -> dict[int, RemoteSamples]:
        """Return the references to responses in engines, by tickets."""
        return {
            ticket: group.generations
            for ticket, group in self._groups.items()
            if isinstance(group.generations, RemoteSamples)
        }

    def lose(self, tickets: Iterable[int]) -> None:
        """Mark groups as waiting again, because the responses are lost."""
        for ticket in tickets:
            self._groups[ticket] = replace(self._groups[ticket], begun=None, generations=None)

    def due(self, version: int) -> list[int]:
        """Return the tickets of groups too stale for the next step."""
        if self._schedule.drops:
            return []
        last = version - self._schedule.max_staleness
        return [ticket for ticket, group in self._groups.items() if group.begun is not None and group.begun <= last]

    def unfinished(self, tickets: Iterable[int]) -> list[int]:
        """Return the tickets among `tickets` whose groups are not finished."""
        return [ticket for ticket in tickets if self._groups[ticket].generations is None]

    @property
    def num_finished(self) -> int:
        """Number of finished groups."""
        return sum(group.generations is not None for group in self._groups.values())

    def take(self, count: int, version: int) -> list[Group]:
        """Remove and return finished groups, due groups first, then the oldest, in the order of tickets."""
        due = set(self.due(version))
        finished = [ticket for ticket, group in self._groups.items() if group.generations is not None]
        chosen = sorted(sorted(finished, key=lambda ticket: (ticket not in due, ticket))[:count])
        assert len(chosen) == count, f"{len(chosen)} groups are finished, and {count} are wanted"
        return self.take_out(chosen)

    def take_out(self, tickets: Iterable[int]) -> list[Group]:
        """Remove and return groups."""
        return [self._groups.pop(ticket) for ticket in tickets]

    def reset(self) -> list[int]:
        """Give all groups new tickets and mark them as waiting; return the old tickets of started groups."""
        started = self.started()
        groups = [replace(group, begun=None, generations=None) for group in self._groups.values()]
        self._groups.clear()
        for group in groups:
            self.add(group)
        return started

    def drop_started(self, keep: int) -> list[int]:
        """Remove all started groups except for `keep` finished groups; return the tickets of the removed groups."""
        started = self.started()
        unfinished = set(self.unfinished(started))
        kept = set([ticket for ticket in started if ticket not in unfinished][:keep])
        dropped = [ticket for ticket in started if ticket not in kept]
        for ticket in dropped:
            del self._groups[ticket]
        return dropped

    # State ------------------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]]:
        """Return all groups for `torch.save`. Responses in an engine are left out."""
        return [
            {
                "prompt": {name: getattr(group.prompt, name) for name in PromptBatch.__slots__},
                "slot": group.batch_index,
                "place": group.position,
                "begun": group.begun,
                "generations": vars(group.generations) if isinstance(group.generations, Generations) else None,
            }
            for group in self._groups.values()
        ]

    def load(self, shares: Sequence[Sequence[Mapping[str, Any]]], rank: int, world_size: int, *, own: bool) -> str:
        """Restore this rank's share of the groups of a checkpoint; unfinished groups are sampled from the start.

        Args:
            shares: states of all ranks of the checkpoint; only this rank's own state if `own`.
            rank: number of this rank.
            world_size: number of ranks now.
            own: True if the checkpoint has as many ranks as now.

        Returns:
            The number of restored groups, in words.
        """
        saved = [group for share in shares for group in share]
        saved.sort(key=lambda group: (group["slot"], group["place"]))
        self._groups, self._tickets = {}, 0
        for state in saved if own else saved[rank::world_size]:
            generations = None if state["generations"] is None else Generations(**state["generations"])
            begun = None if generations is None else state["begun"]
            prompt = PromptBatch(**state["prompt"])
            self.add(Group(prompt, state["slot"], state["place"], begun, generations))
        return f"{len(self)} groups of each worker's queue, {self.num_finished} of them sampled"


def single(prompts: PromptBatch, position: int) -> PromptBatch:
    """Return a batch of one prompt of a batch."""
    columns = {name: [values[position]] for name, values in prompts.columns.items()}
    return PromptBatch([prompts.prompt_ids[position]], [prompts.rows[position]], columns, prompts.epoch)


def together(prompts: Sequence[PromptBatch]) -> PromptBatch:
    """Return one batch of the prompts of several batches; a missing column of a batch is None for its prompts."""
    names = {name: None for batch in prompts for name in batch.columns}
    return PromptBatch(
        [ids for batch in prompts for ids in batch.prompt_ids],
        [row for batch in prompts for row in batch.rows],
        {name: [v for batch in prompts for v in batch.columns.get(name, [None] * len(batch))] for name in names},
        prompts[0].epoch,
    )
