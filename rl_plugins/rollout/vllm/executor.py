"""Executor for engines of several processes: when one process ends, all end immediately, and Ray restarts the engine.

vLLM's shutdown takes seconds. Calls of the engine during the shutdown fail with errors that look like a mistake of the
caller.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import sys
from collections.abc import Callable, Sequence
from threading import Thread

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class OneForAllExecutor(MultiprocExecutor):
    """vLLM's multi-process executor. The executor's process ends as soon as one worker process ends."""

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Watch the workers, instead of vLLM's monitor."""
        sentinels = [worker.proc.sentinel for worker in self.workers]
        end_with(sentinels, unless=lambda: getattr(self, "shutting_down", False))


def end_with(sentinels: Sequence[int], unless: Callable[[], bool] = lambda: False) -> None:
    """End this process when another process has ended.

    Args:
        sentinels: sentinels of the other processes (`multiprocessing.Process.sentinel`).
        unless: function called after the end of a process. If the function returns True, this process continues.
    """

    def watch() -> None:
        multiprocessing.connection.wait(sentinels)
        if not unless():
            print(
                "a process of the vLLM engine has ended: all processes of the engine end", file=sys.stderr, flush=True
            )
            os._exit(1)

    Thread(target=watch, daemon=True, name="end-with-other-processes").start()
