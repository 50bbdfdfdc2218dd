"""Process of a `ChildWorker`: load the rewards, then score requests until the connection ends."""

from __future__ import annotations

import bdb
import ctypes
import json
import os
import pickle
import signal
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Score, failed
from rl_plugins.rewards.user_code import only_one_process
from rl_plugins.rewards.worker import LoadedRewards

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
