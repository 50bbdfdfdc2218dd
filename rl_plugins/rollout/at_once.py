"""Engines that sample in the caller's own process: a group is finished when it has been submitted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rl_plugins.rollout.engine import Generations, GroupRequest, RemoteSamples, SamplingConfig


class SampledAtOnce:
    """The part of `RolloutEngine` that is about groups, by `generate`.

    With a schedule that runs ahead, groups are as stale as those of an engine of its own, and nothing is won: that is
    for debugging.
    """

    sleeps = True
    busy_s = 0.0
    num_living = 1

    def __init__(self) -> None:
        self._finished: dict[int, Generations] = {}

    def generate(self, prompts: list[list[int]], sampling: SamplingConfig, seeds: list[int] | None) -> Generations:
        """See `RolloutEngine`."""
        raise NotImplementedError

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, *, together: bool = True) -> None:
        """Sample the groups."""
        start = time.perf_counter()
        alike: dict[SamplingConfig, list[GroupRequest]] = {}
        for one in requests:
            alike.setdefault(one.shortened(sampling), []).append(one)
        for how, those in alike.items():
            generations = self.generate([one.prompt for one in those], how, [one.seed for one in those])
            parts = generations.split([how.num_samples] * len(those))
            self._finished |= zip([one.ticket for one in those], parts, strict=True)
        self.busy_s += time.perf_counter() - start

    def collect(self, required: Sequence[int], count: int) -> Mapping[int, Generations | RemoteSamples]:
        """All groups that were submitted."""
        finished, self._finished = self._finished, {}
        return finished

    def fetch(self, finished: Sequence[Generations | RemoteSamples]) -> list[Generations | None]:
        """They are in this process."""
        return [one for one in finished if isinstance(one, Generations)]

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget groups."""
        for ticket in tickets:
            self._finished.pop(ticket, None)

    def lost_tickets(self) -> list[int]:
        """None: this process is the engine's."""
        return []

    def drop_lost_engines(self) -> int:
        """Nobody: this process is the engine's."""
        return 0
