"""Sampling of a training rank with several engines: whole batches, or groups that are collected later.

Collected groups stay in the engine. The lengths of the responses decide which rank trains on a group, and this rank
fetches the group.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.errors import EngineLost
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples, collected
from rl_plugins.rollout.vllm.fleet import Deadline, Fleet


class FleetSampling:
    """The sampling methods of `RolloutEngine`.

    Args:
        fleet: engines of the run.

    Attributes:
        busy_s: mean working time of this rank's engines, in seconds.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # Engine of each submitted group before collection, by ticket.
        self._engine_of: dict[int, int] = {}
        self._submitted: dict[Any, int] = {}
        self._polls: dict[Any, int] = {}
        self._reports: dict[Any, int] = {}
        # Time of the last answer of each engine, or of the last check.
        self._heard: dict[int, float] = {}
        self._finished: dict[int, RemoteSamples] = {}
        self._lost_tickets: list[int] = []
        self.busy_s = 0.0
        self._last_busy_s = dict.fromkeys(fleet.engines_of_rank, 0.0)
        self._lost: set[int] = set()
        fleet.on_lost = self._forget

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample the prompts of this rank. Collective."""
        references: dict[Any, int] = {}
        for engine, share in self._fleet.shares(len(prompts)).items():
            part = slice(share.start, share.stop)
            seeds_there = None if seeds is None else seeds[part]
            reference = self._fleet.actors[engine].generate.remote(
                self._fleet.rank, self._fleet.ranks_of_engine(engine), prompts[part], sampling, seeds_there
            )
            references[reference] = engine
        # After the calls, because other ranks of the engines wait for the prompts of this rank.
        self._fleet.check_lost()
        parts: dict[Any, Generations] = {}
        deadline = self._fleet.sampling_deadline()
        while len(parts) < len(references):
            waiting = {pending: engine for pending, engine in references.items() if pending not in parts}
            reference = self._fleet.first(waiting, "generate", deadline)
            engine = references[reference]
            parts[reference], busy_s = self._fleet.result(engine, reference)
            self._count_busy(engine, busy_s)
            self._fleet.mark_warm(engine)
        return Generations.concat([parts[reference] for reference in references])

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Submit groups. Collective if `together`. The engines get images, and make the inputs of images."""
        for engine, share in (self._even if together else self._one_by_one)(requests).items():
            ranks = self._fleet.ranks_of_engine(engine) if together else []
            selected = [without_inputs(request) for request in share]
            self._engine_of |= {request.ticket: engine for request in selected}
            if ranks or selected:
                reference = self._fleet.actors[engine].submit.remote(self._fleet.rank, ranks, selected, sampling)
                self._submitted[reference] = engine

    def _even(self, requests: Sequence[GroupRequest]) -> dict[int, list[GroupRequest]]:
        """Return the requests for each engine of this rank, as many for each engine over all ranks."""
        return {
            engine: [requests[place] for place in share] for engine, share in self._fleet.shares(len(requests)).items()
        }

    def _one_by_one(self, requests: Sequence[GroupRequest]) -> dict[int, list[GroupRequest]]:
        """Return the requests for each engine: the engine of the turn before, or the engine with the fewest groups."""
        groups = Counter(self._engine_of.values())
        selected: dict[int, list[GroupRequest]] = {}
        for request in requests:
            if request.engine is not None and request.engine in self._fleet.living:
                engine = request.engine
            else:
                engine = min(self._fleet.engines_of_rank, key=groups.__getitem__)
            groups[engine] += 1
            selected.setdefault(engine, []).append(request)
        return selected

    def collect(self, required: Sequence[int], count: int) -> dict[int, RemoteSamples]:
        """Wait for groups, and return groups by ticket."""
        self._fleet.check_lost()
        deadline = self._fleet.sampling_deadline()
        while self._submitted:
            reference = self._fleet.first(self._submitted, "submit", deadline)
            self._fleet.result(self._submitted.pop(reference), reference)
        if not required and not count:
            self._take_finished(deadline)
        while True:
            missing = [ticket for ticket in required if ticket not in self._finished]
            if not missing and len(self._finished) >= count:
                return {ticket: self._finished.pop(ticket) for ticket in collected(self._finished, required, count)}
            self._poll(missing, count - len(self._finished))
            self._take(self._fleet.first(self._polls, "collect", deadline))

    def tokens_so_far(self, tickets: Sequence[int]) -> dict[int, list[list[int]]]:
        """Return the tokens that the engines have reported since the last call, and ask the engines again."""
        import ray

        found: dict[int, list[list[int]]] = {}
        if self._reports:
            for reference in ray.wait(list(self._reports), num_returns=len(self._reports), timeout=0)[0]:
                found |= self._fleet.result(self._reports.pop(reference), reference)
        by_engine: dict[int, list[int]] = {}
        for ticket in tickets:
            if ticket in self._engine_of:
                by_engine.setdefault(self._engine_of[ticket], []).append(ticket)
        for engine in by_engine.keys() - set(self._reports.values()):
            reference = self._fleet.actors[engine].tokens_so_far.remote(self._fleet.rank, by_engine[engine])
            self._reports[reference] = engine
        return {ticket: found[ticket] for ticket in tickets if ticket in found}

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Return the responses of groups collected by any rank; None for groups of a lost engine."""
        by_engine: dict[int, dict[int, RemoteSamples]] = {}
        for place, group in enumerate(finished):
            if isinstance(group, RemoteSamples) and group.engine in self._fleet.living:
                by_engine.setdefault(group.engine, {})[place] = group
        timeout_s = self._fleet.config.update_timeout_s
        waits = {
            engine: self._fleet.begin(
                engine,
                "fetch",
                [(group.rank, group.ticket) for group in groups.values()],
                timeout_s=timeout_s,
                phase="fetch",
            )
            for engine, groups in by_engine.items()
        }
        fetched = [group if isinstance(group, Generations) else None for group in finished]
        for engine, wait in waits.items():
            # The next sampling phase handles the loss.
            with suppress(EngineLost):
                there, generations = wait()
                found = [place for place, is_there in zip(by_engine[engine], there, strict=True) if is_there]
                sizes = [len(by_engine[engine][place].lengths) for place in found]
                for place, part in zip(found, generations.split(sizes), strict=True):
                    fetched[place] = part
        return fetched

    def drop(self, tickets: Sequence[int]) -> None:
        """End and remove groups."""
        by_engine: dict[int, list[int]] = {}
        for ticket in tickets:
            self._finished.pop(ticket, None)
            # The engine of a collected group is not recorded, so all engines drop the ticket.
            engines = [self._engine_of.pop(ticket)] if ticket in self._engine_of else self._fleet.living
            for engine in engines:
                by_engine.setdefault(engine, []).append(ticket)
        timeout_s = self._fleet.config.update_timeout_s
        waits = [
            self._fleet.begin(engine, "drop", self._fleet.rank, dropped, timeout_s=timeout_s, phase="drop")
            for engine, dropped in by_engine.items()
        ]
        for wait in waits:
            # A lost engine has lost all groups.
            with suppress(EngineLost):
                wait()
        # Also tickets of engines found lost in these calls.
        self._lost_tickets = [ticket for ticket in self._lost_tickets if ticket not in set(tickets)]

    def lost_tickets(self, among: Container[int] | None = None) -> list[int]:
        """Return the tickets of submitted groups on lost engines, for a new submission."""
        tickets = [ticket for ticket in self._lost_tickets if among is None or ticket in among]
        self._lost_tickets = [ticket for ticket in self._lost_tickets if ticket not in tickets]
        return tickets

    def _poll(self, required: Sequence[int], count: int) -> None:
        """Start a `collect` call on every engine without one. The call returns when awaited groups are finished."""
        engines = set(self._engine_of.values())
        # The only engine may wait for all groups. With several engines, any of them may finish the next group.
        least = count if len(engines) == 1 else 1
        for engine in sorted(engines - set(self._polls.values())):
            tickets = [ticket for ticket in required if self._engine_of[ticket] == engine]
            if tickets or not required:
                collect = self._fleet.actors[engine].collect
                reference = collect.remote(self._fleet.rank, tickets, 0 if required else least)
                self._polls[reference] = engine
                self._heard[engine] = time.monotonic()

    def _take_finished(self, deadline: Deadline) -> None:
        """Take the groups that are finished now, without waiting for others."""
        import ray

        asked = dict(self._polls)
        if asked:
            for reference in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
                self._take(reference)
        now = {
            self._fleet.actors[engine].collect.remote(self._fleet.rank, [], 0): engine
            for engine in set(self._engine_of.values()) - set(self._polls.values())
        }
        self._polls |= now
        self._heard |= dict.fromkeys(now.values(), time.monotonic())
        while left := {reference: engine for reference, engine in now.items() if reference in self._polls}:
            self._take(self._fleet.first(left, "collect", deadline))
        self._check_silent()

    def _check_silent(self) -> None:
        """Check the engines whose `collect` calls have not returned for long: nobody waits for these calls."""
        for engine in list(self._polls.values()):
            if time.monotonic() - self._heard[engine] > self._fleet.stall_timeout_s(engine):
                self._fleet.check_answers(engine)
                self._heard[engine] = time.monotonic()

    def _take(self, reference: Any) -> None:
        """Take the groups of a `collect` call that has returned."""
        engine = self._polls.pop(reference)
        lengths, busy_s = self._fleet.result(engine, reference)
        self._heard[engine] = time.monotonic()
        self._count_busy(engine, busy_s)
        if lengths:
            self._fleet.mark_warm(engine)
        for ticket, response_lengths in lengths.items():
            # Skip groups dropped during the call.
            if self._engine_of.pop(ticket, None) is not None:
                self._finished[ticket] = RemoteSamples(engine, self._fleet.rank, ticket, np.array(response_lengths))

    def _count_busy(self, engine: int, busy_s: float) -> None:
        # A restarted engine counts from 0. After a loss, the rank gets another engine, which worked for other ranks.
        before_s = self._last_busy_s.get(engine, 0.0 if engine in self._lost else busy_s)
        self._lost.discard(engine)
        of_rank = self._fleet.engines_of_rank
        self.busy_s += (busy_s - before_s) / len(of_rank)
        last = {**self._last_busy_s, engine: busy_s}
        self._last_busy_s = {number: last[number] for number in of_rank if number in last}

    def _forget(self, engine: int) -> None:
        """Forget a lost engine, and keep the tickets of its groups for `lost_tickets`."""
        self._lost_tickets += [ticket for ticket, holder in self._engine_of.items() if holder == engine]
        for held in (self._engine_of, self._submitted, self._polls, self._reports):
            for key in [key for key, holder in held.items() if holder == engine]:
                del held[key]
        self._last_busy_s.pop(engine, None)
        self._lost.add(engine)


def without_inputs(request: GroupRequest) -> GroupRequest:
    """Return the request without the policy's inputs of the images. vLLM makes inputs by itself."""
    return request if request.images is None else replace(request, images=request.images.without_inputs())
