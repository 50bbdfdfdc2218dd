"""Sampling of groups ahead of training, as far as the schedule allows, and the queue of groups.

A group waits, is being sampled, or is finished, until a step trains on the group. While a step trains, the engine
samples for later steps. Weights change in flight, and every token carries the version of its policy. Synchronous
sampling is the same code with no groups ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakMethod

import torch

from rl_plugins.config.sampling import SamplingConfig, Schedule
from rl_plugins.data.experience import Experience
from rl_plugins.data.prompts import PromptBatch
from rl_plugins.errors import EngineLost
from rl_plugins.rollout.engine import Generations, GroupRequest, GroupSampler, RemoteSamples, RolloutEngine, sample_seed
from rl_plugins.stages.balancing import even_order, gather_sets, redistribute_groups
from rl_plugins.stages.sampling import PromptSampler
from rl_plugins.strategies.rollout_phases import MAX_LOSSES, lost_too_often

_ROWS = 2**32
"""Bound on the rows of a data set: the number of a group holds the index of its batch above the row."""


@dataclass(frozen=True)
class Group:
    """A prompt and its responses.

    Attributes:
        prompt: batch of this prompt alone.
        batch_index: index of the batch of prompts, from 0.
        position: index of the prompt in the batch of all ranks.
        started_version: version of the policy when the sampling of the group started; None while the group waits.
        generations: responses of a finished group, or a reference to the responses in an engine.
    """

    prompt: PromptBatch
    batch_index: int
    position: int
    started_version: int | None = None
    generations: Generations | RemoteSamples | None = None

    @property
    def number(self) -> int:
        """Number of the group among all groups of a run. A row of the data may be in several groups."""
        return self.batch_index * _ROWS + self.prompt.rows[0]

    @property
    def responses(self) -> Generations | RemoteSamples:
        """Responses of a finished group."""
        assert self.generations is not None, "the group is not finished"
        return self.generations


def row_of(number: int) -> int:
    """Return the row in the data of the prompt of a group."""
    return number % _ROWS


def group_seed(seed: int, number: int) -> int:
    """Return the seed of the samples of a group. The seed depends on neither the rank nor the step of the training."""
    return sample_seed(seed, *divmod(number, _ROWS))


class GroupQueue:
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
            self.add(Group(prompts.single(index), batch_index, index * world_size + rank))

    def add(self, group: Group) -> int:
        """Add a group; return its ticket."""
        self._groups[self._tickets] = group
        self._tickets += 1
        return self._tickets - 1

    def start(self, in_flight: int, version: int) -> list[int]:
        """Mark waiting groups as started until `in_flight` groups are started or finished; return the tickets."""
        waiting = [ticket for ticket, group in self._groups.items() if group.started_version is None]
        chosen = waiting[: max(0, in_flight - (len(self) - len(waiting)))]
        self.mark_started(chosen, version)
        return chosen

    def started(self) -> list[int]:
        """Return the tickets of groups that are being sampled or finished."""
        return [ticket for ticket, group in self._groups.items() if group.started_version is not None]

    def mark_started(self, tickets: Iterable[int], version: int) -> None:
        """Mark groups as started with a version of the policy."""
        for ticket in tickets:
            self._groups[ticket] = replace(self._groups[ticket], started_version=version)

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

    def mark_waiting(self, tickets: Iterable[int]) -> None:
        """Mark groups as waiting again, because the responses are lost."""
        for ticket in tickets:
            self._groups[ticket] = replace(self._groups[ticket], started_version=None, generations=None)

    def due(self, version: int, count: int) -> list[int]:
        """Return the tickets of the groups that must be among the `count` groups of step `version`."""
        if self._schedule.drops:
            return []
        if self._schedule.keeps_order:
            return self.started()[:count]
        return self._started_by(version - self._schedule.max_staleness)

    def leaves_time(self, version: int, count: int, per_step: int) -> bool:
        """Return True if later steps of `per_step` groups can take the unfinished groups before these are too old."""
        if self._schedule.drops or self._schedule.keeps_order:
            return True
        # The steps before `version + later` train on at most `later * per_step` of the groups that are due at that
        # step. This step must take the others.
        for later in range(self._schedule.max_staleness + 1):
            tickets = self._started_by(version + later - self._schedule.max_staleness)
            finished = len(tickets) - len(self.unfinished(tickets))
            if finished < min(len(tickets) - later * per_step, count):
                return False
        return True

    def _started_by(self, version: int) -> list[int]:
        return [
            ticket
            for ticket, group in self._groups.items()
            if group.started_version is not None and group.started_version <= version
        ]

    def unfinished(self, tickets: Iterable[int]) -> list[int]:
        """Return the tickets among `tickets` whose groups are not finished."""
        return [ticket for ticket in tickets if self._groups[ticket].generations is None]

    @property
    def num_finished(self) -> int:
        """Number of finished groups."""
        return sum(group.generations is not None for group in self._groups.values())

    def take(self, count: int, version: int) -> list[Group]:
        """Remove and return finished groups, due groups first, then the oldest, in the order of tickets."""
        due = set(self.due(version, count))
        finished = [ticket for ticket, group in self._groups.items() if group.generations is not None]
        by_age = sorted(finished, key=lambda ticket: (ticket not in due, self._groups[ticket].started_version, ticket))
        chosen = sorted(by_age[:count])
        assert len(chosen) == count, f"{len(chosen)} groups are finished, and {count} are wanted"
        return self.take_out(chosen)

    def take_out(self, tickets: Iterable[int]) -> list[Group]:
        """Remove and return groups."""
        return [self._groups.pop(ticket) for ticket in tickets]

    def reset(self) -> list[int]:
        """Give all groups new tickets and mark them as waiting; return the old tickets of started groups."""
        started = self.started()
        groups = [replace(group, started_version=None, generations=None) for group in self._groups.values()]
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
                "prompt": group.prompt.state(),
                "batch_index": group.batch_index,
                "position": group.position,
                "started_version": group.started_version,
                "generations": vars(group.generations) if isinstance(group.generations, Generations) else None,
            }
            for group in self._groups.values()
        ]

    def load(
        self, shares: Sequence[Sequence[Mapping[str, Any]]], rank: int, world_size: int, *, same_world_size: bool
    ) -> None:
        """Restore this rank's share of the groups of a checkpoint.

        Args:
            shares: states of all ranks of the checkpoint; only this rank's own state if `same_world_size`.
            rank: number of this rank.
            world_size: number of ranks now.
            same_world_size: True if the checkpoint has as many ranks as now.
        """
        saved = [group for share in shares for group in share]
        saved.sort(key=lambda group: (group["batch_index"], group["position"]))
        self._groups, self._tickets = {}, 0
        for state in saved if same_world_size else saved[rank::world_size]:
            generations = None if state["generations"] is None else Generations(**state["generations"])
            started_version = None if generations is None else state["started_version"]
            prompt = PromptBatch.from_state(state["prompt"])
            self.add(Group(prompt, state["batch_index"], state["position"], started_version, generations))


# Sampler ------------------------------------------------------------------------------------------------------------


class ScheduledSampler:
    """Samples groups of responses; holds the queue of requested groups.

    Args:
        sampler: sampler of responses.
        sampling: sampling settings; `num_samples` is the size of a group.
        schedule: bounds on staleness and on groups in flight.
        max_steps: number of steps of the run; 0 for no bound.
        draw: returns this rank's next batch of prompts.

    Attributes:
        num_batches: number of batches of prompts so far.
    """

    def __init__(
        self,
        sampler: PromptSampler,
        sampling: SamplingConfig,
        schedule: Schedule,
        *,
        max_steps: int,
        draw: Callable[[], PromptBatch],
    ) -> None:
        self._sampler, self._sampling, self._schedule = sampler, sampling, schedule
        self._max_steps, self._draw = max_steps, draw
        self._strategy = sampler.strategy
        self._queue = GroupQueue(schedule)
        self._strategy.rollout_phases.on_closed.append(WeakMethod(self._queue.reset))
        self.num_batches, self._groups_per_step, self._busy_before_s, self._lost_before = 0, 0, 0.0, 0

    def begin_step(self, prompts: PromptBatch) -> None:
        """Start the measurements of a step, and put this rank's prompts of the step's batch into the queue."""
        phases = self._strategy.rollout_phases
        self._busy_before_s, self._lost_before = phases.engine.busy_s, phases.engines_lost
        self._groups_per_step = len(prompts)
        self.offer(prompts)

    def offer(self, prompts: PromptBatch) -> None:
        """Put this rank's prompts of a batch into the queue."""
        ranks = self._strategy.ranks
        self._queue.offer(prompts, batch_index=self.num_batches, rank=ranks.rank, world_size=ranks.world_size)
        self.num_batches += 1

    def take_groups(self, count: int, *, step: int, mini_batches: int) -> tuple[PromptBatch, Experience]:
        """Return prompts and samples of `count` groups for this rank. Collective.

        Starts as many waiting groups as the schedule allows, and waits for `count` groups, and for all groups that a
        later step may not train on. The other groups stay in the queue, started or finished.

        Args:
            count: number of groups, equal on all ranks.
            step: step that trains on the groups.
            mini_batches: number of mini-batches of the groups. Inside each mini-batch, groups change
                ranks until all ranks have about the same number of tokens. With 0 no group changes ranks.
        """
        in_flight = self._in_flight(count, step)
        self._draw_until(in_flight)
        self._sample_until(count, step, in_flight)
        groups = self._queue.take(count, step)
        if mini_batches and self._strategy.ranks.world_size > 1:
            with self._strategy.phase_log.measure("balance"):
                groups = self._balance(groups, mini_batches)
        return self._experience(self._fetch(groups, step))

    def _in_flight(self, count: int, step: int) -> int:
        """Return how many groups should be in flight; at most as many as the rest of the run trains on."""
        # With dynamic sampling, earlier draws of this step may have taken groups.
        taken_before = self._groups_per_step - count
        wanted = self._schedule.in_flight(self._groups_per_step) - taken_before
        if self._schedule.drops:
            return wanted
        if self._max_steps:
            wanted = min(wanted, (self._max_steps - step) * self._groups_per_step)
        return max(count, wanted)

    def _draw_until(self, in_flight: int) -> None:
        """Draw batches of prompts until the queue has `in_flight` groups."""
        batches = max(0, math.ceil((in_flight - len(self._queue)) / self._groups_per_step))
        if self._schedule.active:
            # After a restart with another number of ranks, a rank may hold a group more. All ranks draw equally often.
            batches = int(self._strategy.ranks.max(torch.tensor([float(batches)])).item())
        for _ in range(batches):
            self.offer(self._draw())

    def _sample_until(self, count: int, step: int, in_flight: int) -> None:
        """Start waiting groups, and sample until `count` groups and all due groups are finished. Collective."""
        queue = self._queue
        earlier = queue.unfinished(queue.started())
        new = queue.start(in_flight, step)
        due = queue.due(step, count)
        # All ranks submit together, also a rank without new groups (after a restart).
        submits = self._strategy.ranks.any(bool(new))

        def sample(engine: RolloutEngine) -> None:
            # A call after the loss of an engine goes on where the call before ended: the queue has the finished groups,
            # and `submits` is False after the new groups were submitted.
            nonlocal submits
            groups, lost = self._sampler.group_sampler(engine), None
            if submits:
                if earlier:
                    # An engine answers between two of its own steps: ask before the new groups keep it busy.
                    try:
                        queue.finish(groups.collect((), 0))
                    except EngineLost as error:
                        lost = error
                # Also after a loss: the other ranks of an engine wait for the groups of this rank.
                groups.submit(self._requests(new), self._sampling)
                submits = False
                if lost is not None:
                    raise lost
            self._submit_again(groups, groups.lost_tickets(), step)
            missing = max(0, count - queue.num_finished)
            queue.finish(groups.collect(queue.unfinished(due), missing))
            while not queue.leaves_time(step, count, self._groups_per_step):
                queue.finish(groups.collect((), 1))
            if self._schedule.drops:
                groups.drop(queue.drop_started(keep=count))

        self._strategy.rollout_phases.run_sampling(step, sample)

    def _balance(self, groups: list[Group], mini_batches: int) -> list[Group]:
        """Return as many groups with about as many tokens as other ranks have; mini-batches stay equal. Collective."""
        ranks, size = self._strategy.ranks, self._sampling.num_samples
        keys = [(index * ranks.world_size + ranks.rank,) for index in range(len(groups))]
        tokens = [size * len(group.prompt.prompt_ids[0]) + int(group.responses.lengths.sum()) for group in groups]
        ordered = even_order(gather_sets(keys, size, tokens, ranks), mini_batches, ranks.world_size)
        return redistribute_groups(groups, ordered, ranks)

    def _fetch(self, groups: list[Group], step: int) -> list[Group]:
        """Fetch the responses from the engines; sample the groups of a lost engine again. Collective."""
        for _ in range(MAX_LOSSES):
            with self._strategy.phase_log.measure("rollout"):
                sampler = self._sampler.group_sampler(self._strategy.rollout_phases.engine)
                fetched = sampler.fetch([group.responses for group in groups])
            groups = [replace(group, generations=responses) for group, responses in zip(groups, fetched, strict=True)]
            lost = [index for index, responses in enumerate(fetched) if responses is None]
            if not self._strategy.ranks.any(bool(lost)):
                return groups
            sampled = self._sample_again([groups[index] for index in lost], step)
            for index, group in zip(lost, sampled, strict=True):
                groups[index] = group
        raise lost_too_often()

    def _sample_again(self, groups: Sequence[Group], step: int) -> list[Group]:
        """Sample groups of this rank, possibly none, and return the finished groups. Collective."""
        tickets = [self._queue.add(group) for group in groups]
        new = list(tickets)

        def sample(engine: RolloutEngine) -> None:
            sampler = self._sampler.group_sampler(engine)
            self._submit_again(sampler, [*sampler.lost_tickets(), *new], step)
            new.clear()
            self._queue.finish(sampler.collect(self._queue.unfinished(tickets), 0) if tickets else {})

        self._strategy.rollout_phases.run_sampling(step, sample)
        return self._queue.take_out(tickets)

    def _submit_again(self, sampler: GroupSampler, tickets: Sequence[int], step: int) -> None:
        """Submit groups whose responses are lost, without waiting for other ranks."""
        if tickets:
            self._queue.mark_started(tickets, step)
            sampler.submit(self._requests(tickets), self._sampling, together=False)

    def _requests(self, tickets: Sequence[int]) -> list[GroupRequest]:
        groups = {ticket: self._queue[ticket] for ticket in tickets}
        seeds = {ticket: group_seed(self._sampler.seed, group.number) for ticket, group in groups.items()}
        return [self._sampler.request(ticket, group.prompt, 0, seeds[ticket]) for ticket, group in groups.items()]

    def _experience(self, groups: Sequence[Group]) -> tuple[PromptBatch, Experience]:
        prompts = PromptBatch.concat([group.prompt for group in groups])
        generations = [group.generations for group in groups if isinstance(group.generations, Generations)]
        numbers, size = [group.number for group in groups], self._sampling.num_samples
        return prompts, self._sampler.experience(prompts, Generations.concat(generations), size, numbers)

    # Metrics ----------------------------------------------------------------------------------------------------

    def metrics(self, samples: Experience, step: int, seconds: float) -> dict[str, float]:
        """Return idle shares of a step on this rank, the age of its samples, and lost engines. Collective.

        Args:
            samples: samples that the step trained on.
            step: number of finished steps, which is also the version of the policy.
            seconds: duration of the step.
        """
        strategy, engine = self._strategy, self._strategy.rollout_phases.engine
        busy_s = engine.busy_s - self._busy_before_s
        metrics = {
            "idle/trainer": min(1.0, strategy.phase_log.seconds("rollout") / seconds),
            "idle/engine": min(1.0, max(0.0, 1 - busy_s / seconds)),
            "rollout/engines": float(engine.num_living),
            "rollout/engines_lost": float(strategy.rollout_phases.engines_lost - self._lost_before),
        }
        if self._schedule.max_staleness:
            mask_BT = samples.response_mask.double()
            age_BT = (step - samples.policy_versions) * mask_BT
            tokens, age = strategy.ranks.sum(torch.stack([mask_BT.sum(), age_BT.sum()])).tolist()
            metrics["rollout/staleness"] = age / max(tokens, 1)
            oldest = age_BT.max()[None] if age_BT.numel() else age_BT.new_zeros(1)  # all responses may be empty
            metrics["rollout/staleness_max"] = float(strategy.ranks.max(oldest).item())
        return metrics

    # State ------------------------------------------------------------------------------------------------------

    def state(self) -> list[dict[str, Any]] | None:
        """Return this rank's part of the queue with all samples so far; None if no group outlives a step."""
        if not (self._schedule.active or len(self._queue)):
            return None
        queue, engine = self._queue, self._strategy.rollout_phases.engine
        sampler = self._sampler.group_sampler(engine)
        # Conversations would send turns to a sleeping engine. The next step finds a lost engine, and samples again.
        if not engine.sleeps or self._sampler.conversations is None:
            with suppress(EngineLost):
                queue.finish(sampler.collect((), 0))
        remote = queue.remote()
        fetched = dict(zip(remote, sampler.fetch(list(remote.values())), strict=True))
        queue.finish({ticket: responses for ticket, responses in fetched.items() if responses is not None})
        queue.mark_waiting(ticket for ticket, responses in fetched.items() if responses is None)
        return queue.state()

    def load_state(self, shares: Sequence[Any], *, same_world_size: bool) -> str:
        """Restore the queue of a checkpoint; see `GroupQueue.load`."""
        ranks, queue, size = self._strategy.ranks, self._queue, self._sampling.num_samples
        queue.load(shares, ranks.rank, ranks.world_size, same_world_size=same_world_size)
        # Samples of a run with another schedule, or of other groups, are sampled again.
        fits = {t: self._schedule.active and len(queue[t].responses.lengths) == size for t in queue.started()}
        queue.mark_waiting(ticket for ticket, is_fitting in fits.items() if not is_fitting)
        return f"{len(queue)} groups of each worker's queue, {queue.num_finished} of them sampled"

    def restart_groups(self, num_batches: int) -> None:
        """Go on after a checkpoint with a number of batches: sample all groups again, because their policy is gone.

        The data goes on after undone steps, so the number of batches never falls.
        """
        self.num_batches = max(self.num_batches, num_batches)
        if started := self._queue.reset():
            self._sampler.group_sampler(self._strategy.rollout_phases.engine).drop(started)
