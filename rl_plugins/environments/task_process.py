"""Process with code of the user, and its start with a task."""

from __future__ import annotations

import os

from rl_plugins.environments.outbox import Outbox
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.child_process import ChildProcess
from rl_plugins.rewards.limits import WorkerLimits

GRACE_S = 5.0
"""Seconds between the deadline of a call and the end of its process."""


def start_with_task(module: str, task: object, limits: WorkerLimits, kind: str) -> tuple[ChildProcess, Outbox]:
    """Start a process without GPUs and without secrets, and send a task to the process.

    Args:
        module: module whose function `serve` runs in the process; see `ChildProcess`.
        task: record for the process.
        limits: environment of the process.
        kind: name of the user's code in the task for messages, such as `tool`.

    Returns:
        The process, and the sender of further messages to the process.

    Raises:
        ConfigError: the task cannot be sent, or a passed variable exists nowhere.
    """
    import cloudpickle

    environment = dict(os.environ)
    limits.clean(environment)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    try:
        # Functions of a script or a notebook travel by value.
        content = cloudpickle.dumps(task)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the {kind} cannot be sent to its process ({error}): name the {kind} by `_target_` or `path`"
        ) from None
    process = ChildProcess(module, environment)
    outbox = Outbox(process.connection)
    outbox.put(content)
    return process, outbox
