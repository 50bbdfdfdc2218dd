"""Reward worker from both sides: the rewards inside the worker's process, and the record of the worker in a pool.

A pool has one kind of worker: actors of Ray (`ray_worker`), or child processes of this process (`child_worker`).
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.rewards.calling import Router
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.records import Score, ScoringRequest

CHUNK_BUDGET_S = 1.0
"""Seconds after which a worker starts no further call of a chunk."""


@dataclass(frozen=True)
class WorkerTask:
    """Rewards and limits of a worker. The record travels to the worker.

    Attributes:
        reward_config: one reward, or a mapping from data source to reward (see `calling`).
        limits: environment and memory of the worker.
        gpus: GPUs of the worker. With 0, the worker sees no GPU.
    """

    reward_config: Mapping[str, Any]
    limits: WorkerLimits
    gpus: float = 0.0


class LoadedRewards:
    """Rewards inside the process of a worker. Loading is a method, so its errors reach the pool unchanged."""

    def load(self, task: WorkerTask, when_loading: Callable[[str], None] | None = None) -> None:
        """Limit this process and load all rewards.

        Raises:
            ConfigError: a passed variable does not exist, or a reward cannot be loaded.
        """
        task.limits.clean(os.environ)
        # CUDA reserves memory of the host as it likes.
        if not task.gpus or task.limits.memory_mb is not None:
            task.limits.limit_memory()
        self.router = Router(task.reward_config, when_loading)

    def score(self, requests: Sequence[ScoringRequest], deadline_s: float) -> list[Score | None]:
        """Score requests; None for a request to run again."""
        return self.router.score(requests, deadline_s, CHUNK_BUDGET_S)


_MOST_LOST_MACHINES = 3


class WorkerLost(Exception):
    """The process of a worker ended.

    Attributes:
        reason: description of the end.
        machine_lost: True if the machine of the process ended.
    """

    def __init__(self, reason: str, *, machine_lost: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.machine_lost = reason, machine_lost


class RewardWorker(ABC):
    """One place in a pool: the current process, and the requests in progress.

    Attributes:
        rows: numbers of the requests in progress; empty while the rewards are loaded.
        has_loaded: True if a process of the worker has loaded the rewards.
        busy: True while the process loads rewards or scores.
        loading: name of the reward in loading, as far as known.
    """

    def __init__(self, task: WorkerTask, start_timeout_s: float) -> None:
        self.task, self.start_timeout_s = task, start_timeout_s
        self.has_loaded, self._lost_machines = False, 0
        self.start()

    def start(self) -> None:
        """Start a process, which then loads the rewards."""
        self.loading = ""
        self.launch()
        self.busy, self.rows = True, range(0)
        self.expires = time.monotonic() + self.start_timeout_s

    def try_again(self) -> bool:
        """Start a process again whose machine ended before the rewards were loaded.

        Return False after too many such ends in a row.

        Ray asks any machine for a place for an actor without CPUs, also a lost machine before Ray notices the loss.
        """
        self._lost_machines += 1
        if self._lost_machines > _MOST_LOST_MACHINES:
            return False
        self.kill()
        self.start()
        return True

    def send(self, rows: range, requests: Sequence[ScoringRequest], deadline_s: float, wait_s: float) -> None:
        """Let the process score some of the requests, within `wait_s` seconds."""
        self.submit([requests[row] for row in rows], deadline_s)
        self.busy, self.rows = True, rows
        self.expires = time.monotonic() + wait_s

    def receive(self) -> list[Score | None]:
        """Return the scores of the requests in progress, or an empty list after loading.

        Raises:
            ConfigError: the rewards cannot be loaded.
            WorkerLost: the process ended.
        """
        scores = self.take()
        self.has_loaded, self._lost_machines = True, 0
        self.busy, self.rows = False, range(0)
        return scores

    @property
    def remaining_s(self) -> float:
        """Seconds until the hard deadline of the present work."""
        return max(0.0, self.expires - time.monotonic())

    @staticmethod
    @abstractmethod
    def wait(workers: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return workers with an answer or an ended process, after at most `timeout_s` seconds."""

    @abstractmethod
    def launch(self) -> None:
        """Start a process and let it load the rewards."""

    @abstractmethod
    def submit(self, requests: Sequence[ScoringRequest], deadline_s: float) -> None:
        """Send requests to the process."""

    @abstractmethod
    def take(self) -> list[Score | None]:
        """Return the result of the present work."""

    @abstractmethod
    def kill(self) -> None:
        """End the process."""
