"""Parallel scoring in Ray actors. A hanging or dead worker does not end the run.

Requests are sent in chunks, one chunk at a time per worker. Inside a worker, a timer interrupts a call after
`deadline_s` (the soft deadline). If the worker still does not answer, the pool kills the worker (the hard deadline). A
killed or dead worker is replaced, and the samples of its chunk are sent again one by one. A sample fails ("timeout",
"died") only the second time, alone on its worker. A reward may therefore be called twice for one sample. Workers
reserve no CPU of Ray. They import this package and the user's rewards, and no other heavy library.

A library for process pools does not replace this module. pebble kills a worker at every deadline, so there is no soft
deadline, and a worker with a reward model would load the model again. pebble reserves no GPUs and uses one machine.
Ray tasks have no deadline, and Ray may run a task in a process with torch already imported.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.errors import ConfigError, DeadlineExceeded, RewardError
from rl_plugins.rewards.deadline import REPEAT_S
from rl_plugins.rewards.loading import plain
from rl_plugins.rewards.records import Failure, Score, ScoringRequest, check_failure_rate, failed
from rl_plugins.rewards.routing import Router, check_requests, check_routes

logger = logging.getLogger(__name__)
_CHUNK_BUDGET_S = 1.0


class _RewardWorker:
    """Actor of one worker. Loading is a method, so errors of loading reach the pool unchanged."""

    def load(self, reward_config: Mapping[str, Any]) -> None:
        self.router = Router(reward_config)

    def score(self, requests: Sequence[ScoringRequest], deadline_s: float) -> list[Score | None]:
        return self.router.score(requests, deadline_s, _CHUNK_BUDGET_S)


class _WorkerSlot:
    """One place in the pool: the current actor, and the requests in progress."""

    def __init__(self, reward_config: Mapping[str, Any], start_timeout_s: float, gpus: float) -> None:
        self.reward_config, self.start_timeout_s, self.gpus = reward_config, start_timeout_s, gpus
        self.starts = 0
        self.start()

    def start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor_class: Any = ray.remote(_RewardWorker)
        # Without a GPU of its own, a worker would see the GPUs of this process or of the machine.
        no_gpus = {} if self.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        self.actor = actor_class.options(
            num_cpus=0,
            num_gpus=self.gpus,
            max_restarts=0,
            scheduling_strategy=here,
            runtime_env={"env_vars": no_gpus},
        ).remote()
        self.pending = self.actor.load.remote(self.reward_config)  # None when idle
        self.rows = range(0)  # the requests in progress; empty while loading
        self.starts += 1
        self.expires = time.monotonic() + self.start_timeout_s

    def kill(self) -> None:
        import ray

        ray.kill(self.actor, no_restart=True)

    def send(self, rows: range, requests: Sequence[ScoringRequest], deadline_s: float, wait_s: float) -> None:
        self.pending = self.actor.score.remote([requests[row] for row in rows], deadline_s)
        self.rows, self.expires = rows, time.monotonic() + wait_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.expires - time.monotonic())


class RewardPool:
    """Pool with a fixed number of reward workers. One thread may call `score` any number of times."""

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
        """Start the workers, and return before they are ready. Ray must be running.

        Args:
            reward_config: One reward, or a mapping from data source to reward (see `routing`).
            num_workers: Number of worker processes.
            deadline_s: Seconds for one call of a reward function: one sample, or one chunk for a batched function.
            max_failure_rate: Share of failed samples (0 to 1) above which `score` raises an error.
            chunk_size: Largest number of samples sent to a worker at once. The number limits the batch of a batched
                function, and the concurrent coroutines of an async function.
            grace_s: Seconds between the soft deadline and the kill.
            start_timeout_s: Seconds for a worker to start and load the rewards.
            gpus_per_worker: Number of GPUs reserved in Ray for each worker. A fraction shares one GPU. With 0, a
                worker sees no GPU.

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
        self.hard_deadline_s = _CHUNK_BUDGET_S + deadline_s + REPEAT_S + grace_s
        self._slots = [_WorkerSlot(self.reward_config, start_timeout_s, gpus_per_worker) for _ in range(num_workers)]

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score requests in order.

        Raises:
            ConfigError: A worker could not load the rewards when the pool started.
            DeadlineExceeded: A worker did not start in time.
            RewardError: More than `max_failure_rate` of the samples failed (raised as soon as this is certain), a data
                source has no reward, a worker died while it loaded the rewards, or a new worker in place of a lost
                worker could not load the rewards.
            RuntimeError: The pool is closed.
        """
        return self._scores(requests, self.max_failure_rate)

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score or reply to requests in order, and leave the check of the failure rate to the caller.

        The errors are the errors of `score`, except for too many failed samples.
        """
        return self._scores(requests, 1.0)

    def _scores(self, requests: Sequence[ScoringRequest], max_failure_rate: float) -> list[Score]:
        import ray

        if not self._slots:
            raise RuntimeError("the reward pool is closed")
        check_requests(self.reward_config, requests)
        for slot in self._slots:
            if slot.rows:  # an earlier call was interrupted, by Ctrl-C or by too many failures
                slot.kill()
                slot.start()
        scores: list[Score | None] = [None] * len(requests)
        size = max(1, min(self.chunk_size, math.ceil(len(requests) / len(self._slots))))
        todo = deque(range(len(requests))[start : start + size] for start in range(0, len(requests), size))
        suspects: set[int] = set()
        while todo or any(slot.rows for slot in self._slots):
            for slot in self._slots:
                if slot.pending is None and todo:
                    slot.send(todo.popleft(), requests, self.deadline_s, self.hard_deadline_s)
            busy = {slot.pending: slot for slot in self._slots if slot.pending is not None}
            wait_s = min(slot.remaining_s for slot in busy.values())
            done, _ = ray.wait(list(busy), num_returns=1, timeout=wait_s)
            expired = [slot for slot in busy.values() if not slot.remaining_s]
            for slot in [busy[ref] for ref in done] or expired:
                todo.extend(range(row, row + 1) for row in self._collect(slot, scores, suspects))
            check_failure_rate(scores, max_failure_rate)
        return [score for score in scores if score is not None]

    def close(self) -> None:
        """Kill the workers. A closed pool cannot score."""
        for slot in self._slots:
            slot.kill()
        self._slots = []

    def __enter__(self) -> RewardPool:
        """Return the pool. The end of the block closes the pool."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the pool."""
        self.close()

    def _collect(self, slot: _WorkerSlot, scores: list[Score | None], suspects: set[int]) -> list[int]:
        """Take the scores of a worker, or replace the worker; return the rows to send again, each alone."""
        import ray

        try:
            results = ray.get(slot.pending, timeout=slot.remaining_s)
        except ray.exceptions.GetTimeoutError:
            return self._replace(slot, "timeout", "could not be interrupted; killed", scores, suspects)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            return self._replace(slot, "died", " ".join(str(error).split()), scores, suspects)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, ConfigError):
                raise
            if slot.starts == 1:
                raise error.cause from None
            raise RewardError(
                f"a reward worker was replaced, and the new worker cannot load the rewards: {error.cause}"
            ) from None
        for row, score in zip(slot.rows, results or (), strict=True):
            scores[row] = score
        unscored = [row for row in slot.rows if scores[row] is None]
        slot.pending, slot.rows = None, range(0)
        return unscored

    def _replace(
        self, slot: _WorkerSlot, failure: Failure, reason: str, scores: list[Score | None], suspects: set[int]
    ) -> list[int]:
        rows = slot.rows
        if not rows and failure == "timeout":
            raise DeadlineExceeded(
                f"a reward worker did not start and load its rewards within {slot.start_timeout_s:g} s"
            )
        if not rows:
            raise RewardError(f"a reward worker died while it loaded its rewards: {reason}")
        logger.warning("Reward worker with %d samples replaced (%s): %s", len(rows), failure, reason)
        slot.kill()
        slot.start()
        if len(rows) == 1 and rows[0] in suspects:
            message = f"reward worker: {reason}; hard deadline {self.hard_deadline_s:g} s"
            scores[rows[0]] = failed(failure, message)
            return []
        suspects.update(rows)
        return list(rows)
