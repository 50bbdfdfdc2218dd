"""Executors of vLLM with processes that end together: when one process of an engine ends, all end, and Ray restarts it.

vLLM's shutdown takes seconds. Calls of the engine during the shutdown fail with errors that look like a mistake of the
caller. And the process of vLLM's engine core would outlive a killed actor, and keep the memory of its GPU.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rl_plugins.rollout.vllm.engine_files import meeting_in_engine_folder
from rl_plugins.rollout.vllm.start_errors import keep_first_error


class OneProcessExecutor(UniProcExecutor):
    """vLLM's executor in the process of the engine core. The process ends with the process of the actor."""

    def _init_executor(self) -> None:
        end_with_parent()
        keep_first_error()
        super()._init_executor()

    def _distributed_args(self) -> tuple[str, int, int]:
        with meeting_in_engine_folder():
            arguments: tuple[str, int, int] = super()._distributed_args()
        return arguments


class OneForAllExecutor(MultiprocExecutor):
    """vLLM's multi-process executor. Its process ends with the process of the actor, or with one worker process."""

    def _init_executor(self) -> None:
        end_with_parent()
        keep_first_error()
        with meeting_in_engine_folder():
            super()._init_executor()
        self.response_mqs = ResponseQueues(self.response_mqs)

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Watch the workers, instead of vLLM's monitor."""
        sentinels = [worker.proc.sentinel for worker in self.workers]
        end_with(sentinels, unless=lambda: getattr(self, "shutting_down", False))


class ResponseQueues(list[Any]):
    """Queues of all workers' responses. A loop over the queues takes a response from each queue, also after an error.

    A call of all workers ends at the first error, and vLLM leaves the responses of the other workers in their queues.
    Each later call would take the responses of the call before: https://github.com/vllm-project/vllm/issues/49972
    """

    def __iter__(self) -> Iterator[Any]:
        """Yield the queues. A queue with an error takes the responses of the queues behind."""
        queues = list(super().__iter__())
        return (_ResponseQueue(queue, queues[index + 1 :]) for index, queue in enumerate(queues))


class _ResponseQueue:
    def __init__(self, queue: Any, later: Sequence[Any]) -> None:
        self._queue, self._later = queue, later

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, **options: Any) -> tuple[Any, Any]:
        status, result = self._queue.dequeue(**options)
        if status != WorkerProc.ResponseStatus.SUCCESS:
            for queue in self._later:
                queue.dequeue(**options)
        return status, result


def end_with_parent() -> None:
    """End this process when the process that started it has ended. An actor's process has no such parent."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        end_with([parent.sentinel])


def end_with(sentinels: Sequence[int], unless: Callable[[], bool] = lambda: False, after_s: float = 0.0) -> None:
    """End this process and its child processes when another process has ended.

    The workers of an engine do not end by themselves if they wait on their GPUs for a lost worker.

    Args:
        sentinels: sentinels of the other processes (`multiprocessing.Process.sentinel`).
        unless: function called after the end of a process. If the function returns True, this process continues.
        after_s: seconds between the end of the other process and the call of `unless`.
    """

    def watch() -> None:
        multiprocessing.connection.wait(sentinels)
        time.sleep(after_s)
        if not unless():
            print(
                "a process of the vLLM engine has ended: all processes of the engine end", file=sys.stderr, flush=True
            )
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)

    Thread(target=watch, daemon=True, name="end-with-other-processes").start()
