"""An engine of several processes is as good as lost when one of them is: all end at once, and Ray starts them again.

vLLM has a way of its own to end, which takes seconds. What is asked of the engine in that time fails with what looks
like a mistake of whoever asks.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import sys
from collections.abc import Callable, Sequence
from threading import Thread

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class OneForAllExecutor(MultiprocExecutor):
    """vLLM's executor of several worker processes; the process that it is in ends as soon as one of them does."""

    def start_worker_monitor(self, inline: bool = False) -> None:
        """Watch the workers, in vLLM's place."""
        sentinels = [worker.proc.sentinel for worker in self.workers]
        end_with(sentinels, unless=lambda: getattr(self, "shutting_down", False))


def end_with(sentinels: Sequence[int], unless: Callable[[], bool] = lambda: False) -> None:
    """End this process when one of others has ended.

    Args:
        sentinels: of the other processes, as `multiprocessing.Process.sentinel`.
        unless: asked then; if it is so, this process goes on.
    """

    def watch() -> None:
        multiprocessing.connection.wait(sentinels)
        if not unless():
            print("a process of the vLLM engine has ended: the others end, too", file=sys.stderr, flush=True)
            os._exit(1)

    Thread(target=watch, daemon=True, name="end-with-other-processes").start()
