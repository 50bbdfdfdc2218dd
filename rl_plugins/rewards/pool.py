"""Parallel scoring in worker processes. A hanging or dead worker does not end the run.

The workers are actors of Ray where Ray runs, else child processes. Requests are sent in chunks, one chunk at a time per
worker. Inside a worker, a timer interrupts a call after `deadline_s` (the soft deadline). If the worker still does not
answer, the pool kills the worker (the hard deadline). A killed or dead worker is replaced, and the samples of its chunk
are sent again one by one. A sample fails ("timeout", "died") only the second time, alone on its worker. A reward may
therefore be called twice for one sample. Workers import this package and the user's rewards, and no other heavy
library.

A reward on its way, in the order of the calls: `RewardPool.score`, `RewardWorker.send`, the worker's
`LoadedRewards.score`, `Router.score`, `RewardFunction.score`, and `read_scores`, which makes `Score` records.

A library for process pools does not replace this module. pebble kills a worker at every deadline, so there is no soft
deadline, and a worker with a reward model would load the model again. pebble reserves no GPUs and uses one machine.
Ray tasks have no deadline, and Ray may run a task in a process with torch already imported.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.config.judge import key_variables
from rl_plugins.config.models import RewardConfig
from rl_plugins.config.settings import AT_LEAST_1, NOT_NEGATIVE, SECONDS, SECONDS_OR_0, check_ranges
from rl_plugins.control_characters import without_controls
from rl_plugins.errors import ConfigError, DeadlineExceeded, RewardError
from rl_plugins.rewards.calling import check_requests, check_routes
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.loading import plain
from rl_plugins.rewards.records import Failure, FailureRate, Score, ScoringRequest, failed
from rl_plugins.rewards.worker import CHUNK_BUDGET_S, RewardWorker, WorkerLost, WorkerTask
from rl_plugins.user_code import REPEAT_S

logger = logging.getLogger(__name__)
_LATE = "could not be interrupted; killed"


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
        memory_mb: int | None = None,
        pass_env: Sequence[str] = (),
    ) -> None:
        """Start the workers, and return before they are ready.

        Args:
            reward_config: one reward, or a mapping from data source to reward (see `calling`).
            num_workers: number of worker processes.
            deadline_s: seconds for one call of a reward function: one sample, or one chunk for a batched function.
            max_failure_rate: share of failed samples (0 to 1) above which `score` raises an error; see `FailureRate`.
            chunk_size: largest number of samples sent to a worker at once. The number limits the batch of a batched
                function, and the concurrent coroutines of an async function.
            grace_s: seconds between the soft deadline and the kill.
            start_timeout_s: seconds for a worker to start and load the rewards.
            gpus_per_worker: number of GPUs reserved in Ray for each worker. A fraction shares one GPU. With 0, a
                worker sees no GPU. Without Ray, any number shows the worker the GPUs of this process.
            memory_mb: memory of a worker beyond a worker without rewards, in MiB (see `WorkerLimits`).
            pass_env: names of environment variables with secrets that the rewards need. A worker gets no other secret
                but the keys of judges.

        Raises:
            ConfigError: an option is out of range, or a variable of `pass_env` does not exist.
        """
        check_ranges(int, AT_LEAST_1, num_workers=num_workers, chunk_size=chunk_size)
        RewardConfig.check_fields(num_workers=num_workers, deadline_s=deadline_s, max_failure_rate=max_failure_rate)
        check_ranges(float, SECONDS, start_timeout_s=start_timeout_s)
        check_ranges(float, SECONDS_OR_0, grace_s=grace_s)
        check_ranges(float, NOT_NEGATIVE, gpus_per_worker=gpus_per_worker)
        self.reward_config = plain(reward_config)
        check_routes(self.reward_config, ())
        self.deadline_s, self.max_failure_rate, self.chunk_size = deadline_s, max_failure_rate, chunk_size
        self._failure_rate = FailureRate(max_failure_rate)
        self._lock, self._is_closed = threading.Lock(), False
        self.hard_deadline_s = CHUNK_BUDGET_S + deadline_s + REPEAT_S + grace_s
        limits = WorkerLimits.of(pass_env, memory_mb, keys=key_variables(self.reward_config))
        task = WorkerTask(self.reward_config, limits, gpus_per_worker)
        self._kind = _kind_of_workers()
        self._workers: list[RewardWorker] = [self._kind(task, start_timeout_s) for _ in range(num_workers)]

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score requests in order.

        Raises:
            ConfigError: a worker could not load the rewards when the pool started.
            DeadlineExceeded: a worker did not start in time.
            DataError: a data source has no reward.
            RewardError: more than `max_failure_rate` of the samples failed (raised as soon as this is certain), a
                worker died while it loaded the rewards, or a new worker in place of a lost worker could not load the
                rewards.
            RuntimeError: the pool is closed.
        """
        scores = self._scores(requests, self._failure_rate)
        self._failure_rate.add(scores)
        return scores

    def answer(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score or reply to requests in order, and leave the check of the failure rate to the caller.

        The errors are the errors of `score`, except for too many failed samples.
        """
        return self._scores(requests, FailureRate(1.0))

    def _scores(self, requests: Sequence[ScoringRequest], failure_rate: FailureRate) -> list[Score]:
        # Another thread may have a call whose turns are dropped.
        with self._lock:
            return self._scores_of_call(requests, failure_rate)

    def _scores_of_call(self, requests: Sequence[ScoringRequest], failure_rate: FailureRate) -> list[Score]:
        if not self._workers:
            raise RuntimeError("the reward pool is closed")
        check_requests(self.reward_config, requests)
        for worker in self._workers:
            if worker.rows:  # an earlier call was interrupted, by Ctrl-C or by too many failures
                worker.kill()
                worker.start()
        scores: list[Score | None] = [None] * len(requests)
        size = max(1, min(self.chunk_size, math.ceil(len(requests) / len(self._workers))))
        todo = deque(range(len(requests))[start : start + size] for start in range(0, len(requests), size))
        suspects: set[int] = set()
        while todo or any(worker.rows for worker in self._workers):
            for worker in self._workers:
                if not worker.busy and todo:
                    worker.send(todo.popleft(), requests, self.deadline_s, self.hard_deadline_s)
            busy = [worker for worker in self._workers if worker.busy]
            done = self._kind.wait(busy, min(worker.remaining_s for worker in busy))
            late = [] if done else [worker for worker in busy if not worker.remaining_s]
            again = [row for worker in done for row in self._collect(worker, scores, suspects)]
            again += [row for worker in late for row in self._replace(worker, "timeout", _LATE, scores, suspects)]
            todo.extend(range(row, row + 1) for row in again)
            failure_rate.check(scores)
        return [score for score in scores if score is not None]

    def close(self) -> None:
        """Kill the workers. A closed pool cannot score."""
        self._is_closed = True
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def __enter__(self) -> RewardPool:
        """Return the pool. The end of the block closes the pool."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the pool."""
        self.close()

    def _collect(self, worker: RewardWorker, scores: list[Score | None], suspects: set[int]) -> list[int]:
        """Take the scores of a worker, or replace the worker; return the rows to send again, each alone."""
        rows = worker.rows
        try:
            results = worker.receive()
        except WorkerLost as lost:
            if lost.machine_lost and not rows and not self._is_closed and worker.try_again():
                logger.warning("Reward worker started again: %s", without_controls(lost.reason))
                return []
            return self._replace(worker, "died", lost.reason, scores, suspects)
        except ConfigError as error:
            if not worker.has_loaded:
                raise
            raise RewardError(
                f"a reward worker was replaced, and the new worker cannot load the rewards: {error}"
            ) from None
        for row, score in zip(rows, results, strict=True):
            scores[row] = score
        return [row for row in rows if scores[row] is None]

    def _replace(
        self, worker: RewardWorker, failure: Failure, reason: str, scores: list[Score | None], suspects: set[int]
    ) -> list[int]:
        rows = worker.rows
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        if not rows and failure == "timeout":
            raise DeadlineExceeded(
                f"a reward worker did not start and load its rewards within {worker.start_timeout_s:g} s"
            )
        if not rows:
            raise RewardError(f"a reward worker died while it loaded its rewards: {reason}")
        logger.warning("Reward worker with %d samples replaced (%s): %s", len(rows), failure, without_controls(reason))
        worker.kill()
        worker.start()
        if len(rows) == 1 and rows[0] in suspects:
            message = f"reward worker: {reason}; hard deadline {self.hard_deadline_s:g} s"
            scores[rows[0]] = failed(failure, message)
            return []
        suspects.update(rows)
        return list(rows)


def _kind_of_workers() -> type[RewardWorker]:
    """Return the actors of Ray if Ray runs in this process, else child processes."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        from rl_plugins.rewards.ray_worker import RayWorker

        return RayWorker
    from rl_plugins.rewards.child_worker import ChildWorker

    return ChildWorker
