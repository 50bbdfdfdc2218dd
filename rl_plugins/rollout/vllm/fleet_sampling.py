"""What a training rank has engines sample: whole batches, or groups that it collects when they are finished.

Collected groups stay with their engine: their lengths decide which rank trains on them, and that one fetches them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rl_plugins.errors import EngineLost
from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples, SamplingConfig
from rl_plugins.rollout.vllm.fleet import Fleet, Patience


class FleetSampling:
    """The part of `RolloutEngine` that is about samples.

    Args:
        fleet: the engines.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        # Groups that were submitted and not collected, by their tickets.
        self._engine_of: dict[int, int] = {}
        self._submitted: dict[Any, int] = {}
        self._polls: dict[Any, int] = {}
        self._finished: dict[int, RemoteSamples] = {}
        self._lost_tickets: list[int] = []
        self._busy_s: dict[int, float] = {}
        fleet.on_lost = self._forget

    @property
    def busy_s(self) -> float:
        """Seconds of work, as the engines beside this rank said last; their mean."""
        # Others were beside it while one of these was lost.
        said = [self._busy_s[engine] for engine in self._fleet.engines_of_rank if engine in self._busy_s]
        return sum(said) / max(len(said), 1)

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """Sample this rank's prompts. Collective."""
        self._fleet.check_lost()
        references: dict[Any, int] = {}
        for engine, share in self._fleet.shares(len(prompts)).items():
            part = slice(share.start, share.stop)
            seeds_there = None if seeds is None else seeds[part]
            reference = self._fleet.actors[engine].generate.remote(
                self._fleet.rank, self._fleet.ranks_of_engine(engine), prompts[part], sampling, seeds_there
            )
            references[reference] = engine
        parts: dict[Any, Generations] = {}
        patience = self._fleet.patience()
        while len(parts) < len(references):
            waiting = {one: engine for one, engine in references.items() if one not in parts}
            reference = self._fleet.first(waiting, "generate", patience)
            parts[reference], self._busy_s[references[reference]] = self._fleet.result(references[reference], reference)
        return Generations.concat([parts[reference] for reference in references])

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Have groups sampled. Collective if they begin together."""
        for engine, share in self._fleet.shares(len(requests)).items():
            ranks = self._fleet.ranks_of_engine(engine) if together else []
            mine = [requests[place] for place in share]
            self._engine_of |= {one.ticket: engine for one in mine}
            if ranks or mine:
                reference = self._fleet.actors[engine].submit.remote(self._fleet.rank, ranks, mine, sampling)
                self._submitted[reference] = engine

    def collect(self, required: Sequence[int], count: int) -> dict[int, RemoteSamples]:
        """Wait for groups; returns those that are finished."""
        self._fleet.check_lost()
        patience = self._fleet.patience()
        while self._submitted:
            reference = self._fleet.first(self._submitted, "submit", patience)
            self._fleet.result(self._submitted.pop(reference), reference)
        if not required and not count:
            self._take_what_is_there(patience)
        while True:
            missing = [ticket for ticket in required if ticket not in self._finished]
            if not missing and len(self._finished) >= count:
                finished, self._finished = self._finished, {}
                return finished
            self._poll(missing, count - len(self._finished))
            self._take(self._fleet.first(self._polls, "collect", patience))

    def _poll(self, required: Sequence[int], count: int) -> None:
        """Have every engine tell what is finished as soon as it is what is waited for."""
        asked = set(self._polls.values())
        engines = set(self._engine_of.values())
        for engine in sorted(engines - asked):
            theirs = [ticket for ticket in required if self._engine_of[ticket] == engine]
            if theirs or not required:
                enough = 0 if required else count if len(engines) == 1 else 1
                self._polls[self._fleet.actors[engine].collect.remote(self._fleet.rank, theirs, enough)] = engine

    def _take_what_is_there(self, patience: Patience) -> None:
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
        while left := {reference: engine for reference, engine in now.items() if reference in self._polls}:
            self._take(self._fleet.first(left, "collect", patience))

    def _take(self, reference: Any) -> None:
        engine = self._polls.pop(reference)
        lengths, self._busy_s[engine] = self._fleet.result(engine, reference)
        for ticket, of_responses in lengths.items():
            # One that was dropped in the meantime is of no use.
            if self._engine_of.pop(ticket, None) is not None:
                self._finished[ticket] = RemoteSamples(engine, self._fleet.rank, ticket, np.array(of_responses))

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """Responses that any rank has collected; None of what went with a lost engine."""
        theirs: dict[int, dict[int, RemoteSamples]] = {}
        for place, one in enumerate(finished):
            if isinstance(one, RemoteSamples) and one.engine in self._fleet.living:
                theirs.setdefault(one.engine, {})[place] = one
        timeout_s = self._fleet.config.update_timeout_s
        waits = {
            engine: self._fleet.begin(
                engine, "fetch", [(one.rank, one.ticket) for one in held.values()], timeout_s=timeout_s, phase="fetch"
            )
            for engine, held in theirs.items()
        }
        fetched = [one if isinstance(one, Generations) else None for one in finished]
        for engine, wait in waits.items():
            # The next phase of sampling hears that it is lost.
            with suppress(EngineLost):
                there, generations = wait()
                found = [place for place, is_there in zip(theirs[engine], there, strict=True) if is_there]
                sizes = [len(theirs[engine][place].lengths) for place in found]
                for place, part in zip(found, generations.split(sizes), strict=True):
                    fetched[place] = part
        return fetched

    def drop(self, tickets: Sequence[int]) -> None:
        """End groups, and forget them."""
        theirs: dict[int, list[int]] = {}
        for ticket in tickets:
            self._finished.pop(ticket, None)
            # One that is finished is with any of them.
            engines = [self._engine_of.pop(ticket)] if ticket in self._engine_of else self._fleet.living
            for engine in engines:
                theirs.setdefault(engine, []).append(ticket)
        timeout_s = self._fleet.config.update_timeout_s
        waits = [
            self._fleet.begin(engine, "drop", self._fleet.rank, dropped, timeout_s=timeout_s, phase="drop")
            for engine, dropped in theirs.items()
        ]
        for wait in waits:
            # A lost engine has dropped all it had.
            with suppress(EngineLost):
                wait()

    def lost_tickets(self) -> list[int]:
        """Of groups that were submitted, and went with an engine that was lost; to be submitted again."""
        tickets, self._lost_tickets = self._lost_tickets, []
        return tickets

    def _forget(self, engine: int) -> None:
        self._lost_tickets += [ticket for ticket, holder in self._engine_of.items() if holder == engine]
        for held in (self._engine_of, self._submitted, self._polls):
            for key in [key for key, holder in held.items() if holder == engine]:
                del held[key]
        self._busy_s.pop(engine, None)
