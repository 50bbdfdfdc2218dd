"""Scoring in parallel in Ray actors that may hang or die without taking the run with them.

Requests go out in chunks, one chunk at a time per worker. Inside a worker a timer interrupts a call after
`deadline_s` (the soft deadline). A worker that still does not answer is killed (the hard deadline), one that
dies is noticed; both are replaced, and the chunk's samples are sent again one by one. A sample is blamed
("timeout", "died") only the second time, alone on its worker; so a reward may be called twice for one sample.
Workers need no CPU slot of Ray's and import nothing but this room and the user's rewards.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.rewards.calling import LOOP_GRACE_S
from rl_plugins.rewards.failures import check_failure_rate
from rl_plugins.rewards.loading import plain
from rl_plugins.rewards.records import Failure, Score, ScoringRequest
from rl_plugins.rewards.results import failed
from rl_plugins.rewards.routing import Router, check_routes

logger = logging.getLogger(__name__)
_CHUNK_BUDGET_S = 1.0


class _Worker:
    """The actor. Loading is a method, so that its errors reach the pool as they are."""

    def load(self, reward_config: Mapping[str, Any]) -> None:
        self.router = Router(reward_config)

    def score(self, requests: Sequence[ScoringRequest], deadline_s: float) -> list[Score | None]:
        return self.router.score(requests, deadline_s, _CHUNK_BUDGET_S)


class _Seat:
    """One place in the pool: its current actor, and what that actor is busy with."""

    def __init__(self, reward_config: Mapping[str, Any], start_timeout_s: float, gpus: float) -> None:
        self.reward_config, self.start_timeout_s, self.gpus = reward_config, start_timeout_s, gpus
        self.start()

    def start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor_class: Any = ray.remote(_Worker)
        self.actor = actor_class.options(
            num_cpus=0, num_gpus=self.gpus, max_restarts=0, scheduling_strategy=here
        ).remote()
        self.pending = self.actor.load.remote(self.reward_config)  # None when idle
        self.rows = range(0)  # the requests being scored; empty while loading
        self.expires = time.monotonic() + self.start_timeout_s

    def kill(self) -> None:
        import ray

        ray.kill(self.actor, no_restart=True)

    def send(self, rows: range, requests: Sequence[ScoringRequest], deadline_s: float, wait_s: float) -> None:
        self.pending = self.actor.score.remote([requests[row] for row in rows], deadline_s)
        self.rows, self.expires = rows, time.monotonic() + wait_s

    @property
    def patience_s(self) -> float:
        return max(0.0, self.expires - time.monotonic())


class RewardPool:
    """A fixed number of reward workers; `score` may be called again and again, from one thread."""

    def __init__(
        self,
        reward_config: Mapping[str, Any],
        *,
        num_workers: int,
        deadline_s: float,
        max_failure_rate: float = 0.0,
        chunk_size: int = 32,
        grace_s: float = 5.0,
        start_timeout_s: float = 120.0,
        gpus_per_worker: float = 0.0,
    ) -> None:
        """Start the workers without waiting for them. Ray must be running.

        Args:
            reward_config: One reward, or a mapping from data_source to rewards (see `routing`).
            num_workers: Number of processes.
            deadline_s: Seconds for one call of a reward function: one sample, or one chunk if it is batched.
            max_failure_rate: Share of failed samples (0 to 1) above which `score` raises.
            chunk_size: Most samples sent to a worker at once: what a batched reward gets, and how many
                coroutines of an async one run concurrently in a worker.
            grace_s: Seconds between the soft deadline and the kill.
            start_timeout_s: Seconds in which a worker must have started and loaded the rewards.
            gpus_per_worker: GPUs of Ray's that each worker reserves, a share of one if below 1; with 0 it sees none.

        Raises:
            ConfigError: An option is out of range, or Ray is not running.
        """
        import ray

        positive = {"num_workers": num_workers, "deadline_s": deadline_s, "chunk_size": chunk_size}
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"rewards: {name} must be greater than 0, not {value}")
        if not ray.is_initialized():
            raise ConfigError("a reward pool needs Ray: call ray.init(), or score with InlineScorer instead")
        self.reward_config = plain(reward_config)
        check_routes(self.reward_config, ())
        self.deadline_s, self.max_failure_rate, self.chunk_size = deadline_s, max_failure_rate, chunk_size
        self.hard_deadline_s = _CHUNK_BUDGET_S + deadline_s + LOOP_GRACE_S + grace_s
        self._seats = [_Seat(self.reward_config, start_timeout_s, gpus_per_worker) for _ in range(num_workers)]

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score in the order of the requests.

        Raises:
            ConfigError: A data_source has no reward, or a worker could not load the rewards.
            DeadlineExceeded: A worker did not start in time.
            RewardFailureError: More than `max_failure_rate` of the samples failed; raised once that
                is certain.
            RuntimeError: The pool is closed, or a worker died while it loaded the rewards.
        """
        return self._scores(requests, self.max_failure_rate)

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score some of the samples of a step, or reply to them; however many fail, that is for the caller to judge."""
        return self._scores(requests, 1.0)

    def _scores(self, requests: Sequence[ScoringRequest], max_failure_rate: float) -> list[Score]:
        import ray

        if not self._seats:
            raise RuntimeError("the reward pool is closed")
        check_routes(self.reward_config, {request.data_source for request in requests})
        for seat in self._seats:
            if seat.rows:  # an earlier call was interrupted, by Ctrl-C or by too many failures
                seat.kill()
                seat.start()
        scores: list[Score | None] = [None] * len(requests)
        size = max(1, min(self.chunk_size, math.ceil(len(requests) / len(self._seats))))
        todo = deque(range(len(requests))[start : start + size] for start in range(0, len(requests), size))
        suspects: set[int] = set()
        while todo or any(seat.rows for seat in self._seats):
            for seat in self._seats:
                if seat.pending is None and todo:
                    seat.send(todo.popleft(), requests, self.deadline_s, self.hard_deadline_s)
            busy = {seat.pending: seat for seat in self._seats if seat.pending is not None}
            wait_s = min(seat.patience_s for seat in busy.values())
            done, _ = ray.wait(list(busy), num_returns=1, timeout=wait_s)
            expired = [seat for seat in busy.values() if not seat.patience_s]
            for seat in [busy[ref] for ref in done] or expired:
                todo.extend(range(row, row + 1) for row in self._collect(seat, scores, suspects))
            check_failure_rate(scores, max_failure_rate)
        return [score for score in scores if score is not None]

    def close(self) -> None:
        """Kill the workers; a closed pool cannot score."""
        for seat in self._seats:
            seat.kill()
        self._seats = []

    def __enter__(self) -> RewardPool:
        """Return the pool; leaving the block closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the pool."""
        self.close()

    def _collect(self, seat: _Seat, scores: list[Score | None], suspects: set[int]) -> list[int]:
        """Take what the worker has, or replace the worker; return the rows to be sent again, each alone."""
        import ray

        try:
            results = ray.get(seat.pending, timeout=seat.patience_s)
        except ray.exceptions.GetTimeoutError:
            return self._replace(seat, "timeout", "could not be interrupted; killed", scores, suspects)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            return self._replace(seat, "died", " ".join(str(error).split()), scores, suspects)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, ConfigError) else error) from None
        for row, score in zip(seat.rows, results or (), strict=True):
            scores[row] = score
        unscored = [row for row in seat.rows if scores[row] is None]
        seat.pending, seat.rows = None, range(0)
        return unscored

    def _replace(
        self, seat: _Seat, failure: Failure, reason: str, scores: list[Score | None], suspects: set[int]
    ) -> list[int]:
        rows = seat.rows
        if not rows and failure == "timeout":
            raise DeadlineExceeded(
                f"a reward worker did not start and load its rewards within {seat.start_timeout_s:g} s"
            )
        if not rows:
            raise RuntimeError(f"a reward worker died while it loaded its rewards: {reason}")
        logger.warning("Reward worker with %d samples replaced (%s): %s", len(rows), failure, reason)
        seat.kill()
        seat.start()
        if len(rows) == 1 and rows[0] in suspects:
            message = f"reward worker: {reason}; hard deadline {self.hard_deadline_s:g} s"
            scores[rows[0]] = failed(failure, message)
            return []
        suspects.update(rows)
        return list(rows)
