"""Times of the turns of a conversation: the sampling of a response, the work of the environment, and waits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

_ZERO = time.time() - time.monotonic()


def unix_time(monotonic_s: float | None = None) -> float:
    """Return the Unix time of a time of `time.monotonic`, by default of now. Such times never run backwards."""
    return _ZERO + (time.monotonic() if monotonic_s is None else monotonic_s)


@dataclass(frozen=True)
class Work:
    """Work of an environment on a response, such as a call of a tool.

    Attributes:
        name: name of the tool, or of the part of the environment.
        start: Unix time of the start.
        seconds: duration.
    """

    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class TurnTimes:
    """Times of a turn.

    Attributes:
        place: place of the response in `Ending.said`.
        asked: Unix time of the request for the response.
        sampled: Unix time at which the worker had the response. The worker takes no response while it trains.
        answered: Unix time of the answer of the environment.
        work: work of the environment between the last two times; empty if the environment does not report its work.
    """

    place: int
    asked: float
    sampled: float
    answered: float
    work: Sequence[Work] = ()

    @property
    def sampling_s(self) -> float:
        """Seconds from the request to the response."""
        return self.sampled - self.asked

    @property
    def environment_s(self) -> float:
        """Seconds in which the environment worked: at least one piece of work ran."""
        if not self.work:
            return self.answered - self.sampled
        seconds, reached = 0.0, self.sampled
        for work in sorted(self.work, key=lambda work: work.start):
            start, end = max(reached, work.start), min(self.answered, work.start + work.seconds)
            seconds += max(0.0, end - start)
            reached = max(reached, end)
        return seconds

    @property
    def queue_s(self) -> float:
        """Seconds between the response and the answer in which the environment did not work."""
        return max(0.0, self.answered - self.sampled - self.environment_s)
