"""Reward workers as child processes of this process, for runs without Ray: both ends of the connection.

A child process gets requests as pickles and answers in JSON, so this process runs no code from a child process. A child
process is the leader of its own group of processes, and the whole group is killed. The kernel also kills a child
process at the end of the thread of its start.
"""

from __future__ import annotations

import bdb
import ctypes
import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Score, ScoringRequest, failed
from rl_plugins.rewards.worker import LoadedRewards, RewardWorker, WorkerLost
from rl_plugins.user_code import only_one_process


class ChildWorker(RewardWorker):
    """Child process of this process."""

    def launch(self) -> None:
        """Start a child process, which then loads the rewards."""
        environment = dict(os.environ)
        self.task.limits.clean(environment)
        if not self.task.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._connection, theirs = Pipe()
        with theirs:
            start = f"from rl_plugins.rewards.child_worker import serve; serve({theirs.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}"],
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        # The end of a process is no end of the connection, if a copy of the process lives on.
        self._ended = os.pidfd_open(self._process.pid)
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
            self._connection.send_bytes(content)

    @staticmethod
    def wait(workers: Sequence[ChildWorker], timeout_s: float) -> list[ChildWorker]:
        """Return the workers with an answer, and the workers whose process has ended."""
        handles: dict[Connection | int, ChildWorker] = {}
        for worker in workers:
            handles |= {worker._connection: worker, worker._ended: worker}
        ready = wait(list(handles), None if timeout_s == math.inf else timeout_s)
        known = {id(handles[handle]): handles[handle] for handle in ready}  # type: ignore[index]
        return [worker for worker in known.values() if worker._read()]

    def _read(self) -> bool:
        """Read messages; return True if there is an answer or the process has ended."""
        try:
            while self._answer is None and self._connection.poll():
                message = json.loads(self._connection.recv_bytes())
                if "loading" in message:
                    self.loading = str(message["loading"])
                elif "debugging" in message:
                    # Nobody knows how long a person looks at a breakpoint.
                    self.expires = math.inf
                else:
                    self._answer = message
        except (EOFError, OSError, ValueError):
            return True
        return self._answer is not None or bool(wait([self._ended], 0))

    def take(self) -> list[Score | None]:
        """Return the answer of the child process."""
        if self._answer is None:
            raise WorkerLost(f"the process {self._end()}")
        if "error" in self._answer:
            raise ConfigError(str(self._answer["error"]))
        if "interrupted" in self._answer:
            raise KeyboardInterrupt
        return [None if score is None else Score(**score) for score in self._answer["scores"]]

    def _end(self) -> str:
        """Describe the end of the process."""
        wait([self._ended], 1.0)
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return "closed its connection"
        if status.si_code == os.CLD_EXITED:
            return f"ended with exit status {status.si_status}"
        return f"was ended by the signal {signal.Signals(status.si_status).name}"

    def kill(self) -> None:
        """End the child process and all processes of its group."""
        if self._process.returncode is not None:
            return
        # The process is still a zombie at least, so no other group can have its number.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        os.close(self._ended)


# In the child process -----------------------------------------------------------------------------------------------

_PR_SET_PDEATHSIG = 1


def serve(descriptor: int, parent: int) -> None:
    """Serve the parent process.

    Args:
        descriptor: File descriptor of the connection.
        parent: Number of the parent process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)

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
