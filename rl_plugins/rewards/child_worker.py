"""Reward workers as child processes of this process, for runs without Ray: both ends of the connection.

A child process gets requests as pickles and answers in JSON, so this process runs no code from a child process.
"""

from __future__ import annotations

import bdb
import json
import math
import os
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.child_process import ChildProcess
from rl_plugins.rewards.records import Score, ScoringRequest, failed
from rl_plugins.rewards.worker import LoadedRewards, RewardWorker, WorkerLost, WorkerTask
from rl_plugins.user_code import only_one_process


class ChildWorker(RewardWorker):
    """Child process of this process.

    Args:
        task: rewards and limits.
        start_timeout_s: seconds for a process to start and load the rewards.
        load_timeout_s: seconds for the rewards to load, once the process has started.
    """

    def __init__(self, task: WorkerTask, start_timeout_s: float, load_timeout_s: float = math.inf) -> None:
        self._load_timeout_s = load_timeout_s
        super().__init__(task, start_timeout_s)

    def launch(self) -> None:
        """Start a child process, which then loads the rewards."""
        environment = dict(os.environ)
        self.task.limits.clean(environment)
        if not self.task.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._process = ChildProcess("rl_plugins.rewards.child_worker", environment)
        self._answer: dict[str, Any] | None = None
        self._send(self.task)

    def submit(self, requests: Sequence[ScoringRequest], deadline_s: float) -> None:
        """Send requests to the child process."""
        self._answer = None
        self._send((list(requests), deadline_s))

    def _send(self, message: object) -> None:
        try:
            content = pickle.dumps(message)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.kill()
            raise ConfigError(
                f"a reward or a sample cannot be sent to a reward worker ({error}): name the reward by `_target_` or "
                "`path`, or score with InlineScorer"
            ) from None
        with suppress(OSError):  # `take` tells how the process ended.
            self._process.connection.send_bytes(content)

    @staticmethod
    def wait(workers: Sequence[ChildWorker], timeout_s: float) -> list[ChildWorker]:
        """Return the workers with an answer, and the workers whose process has ended."""
        handles: dict[Connection | int, ChildWorker] = {}
        for worker in workers:
            handles |= {worker._process.connection: worker, worker._process.ended: worker}
        ready = wait(list(handles), None if timeout_s == math.inf else timeout_s)
        known = {id(handles[handle]): handles[handle] for handle in ready}  # type: ignore[index]
        return [worker for worker in known.values() if worker._read()]

    def _read(self) -> bool:
        """Read messages; return True if there is an answer or the process has ended."""
        try:
            while self._answer is None and self._process.connection.poll():
                message = json.loads(self._process.connection.recv_bytes())
                if "loading" in message:
                    if not self.loading:
                        self.expires = min(self.expires, time.monotonic() + self._load_timeout_s)
                    self.loading = str(message["loading"])
                elif "debugging" in message:
                    # Nobody knows how long a person looks at a breakpoint.
                    self.expires = math.inf
                else:
                    self._answer = message
        except (EOFError, OSError, ValueError):
            return True
        return self._answer is not None or self._process.has_ended()

    def take(self) -> list[Score | None]:
        """Return the answer of the child process."""
        if self._answer is None:
            raise WorkerLost(f"the process {self._process.describe_end()}")
        if "error" in self._answer:
            raise ConfigError(str(self._answer["error"]))
        if "interrupted" in self._answer:
            raise KeyboardInterrupt
        return [None if score is None else Score(**score) for score in self._answer["scores"]]

    def kill(self) -> None:
        """End the child process and all processes of its group."""
        self._process.kill()


# In the child process -----------------------------------------------------------------------------------------------


def serve(connection: Connection) -> None:
    """Serve the parent process.

    Args:
        connection: connection to the parent process.
    """

    def send(**message: Any) -> None:
        connection.send_bytes(json.dumps(message).encode())

    def when_audited(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "builtins.breakpoint":
            send(debugging=True)

    sys.addaudithook(when_audited)
    rewards = LoadedRewards()
    try:
        with only_one_process("of this worker"):
            rewards.load(pickle.loads(connection.recv_bytes()), lambda name: send(loading=name))
            send(scores=[])
            while True:
                requests, deadline_s = pickle.loads(connection.recv_bytes())
                scores = rewards.score(requests, deadline_s)
                sys.stdout.flush()
                send(scores=[_plain(score) for score in scores])
    except ConfigError as error:
        send(error=str(error))
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        send(error=f"a reward or a sample cannot be read in a reward worker ({error}): name the reward by `_target_`")
    except (KeyboardInterrupt, bdb.BdbQuit):
        send(interrupted=True)
    except (EOFError, BrokenPipeError):
        pass  # The pool was closed.


def _plain(score: Score | None) -> dict[str, Any] | None:
    """Return a score as JSON values."""
    if score is None:
        return None
    try:
        json.dumps(score.reply)
    except (TypeError, ValueError) as error:
        score = failed("raised", f"the reply holds more than text, numbers, lists and mappings ({error})")
    return asdict(score)
