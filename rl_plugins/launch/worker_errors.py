"""Errors of Ray Train workers: a `UserError` ends the run. After other errors the workers restart.

By default Ray Train restarts the workers after every error, which cannot correct a `UserError`, and prints the
traceback of every worker. Ray Train does not restart the workers after a `ControllerError`. Ray Train restarts the
workers silently, so `WorkerFailures` prints and saves each error.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.exceptions import OutOfMemoryError, RayActorError, RaySystemError
from ray.train import ControllerError, UserCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from typing_extensions import override

from rl_plugins.control_characters import without_controls
from rl_plugins.errors import RayLost, UserError
from rl_plugins.redaction import redacted
from rl_plugins.run_folder import RunFolder
from rl_plugins.whole_file import only_printed

_SHOWN = 300


class WorkerFailures(UserCallback):
    """Callback in Ray Train's controller: no restart after a `UserError`, and a message for every other restart.

    Ray Train restarts the workers without a limit after the loss of a preempted machine, so such a loss does not count.

    Args:
        folder: folder of the run.
        max_restarts: number of failures with a restart. Ray Train raises the error of the next failure.
    """

    def __init__(self, folder: RunFolder, max_restarts: int) -> None:
        self._folder, self._max_restarts, self._failures = folder, max_restarts, 0
        # Workers whose preempted machines were lost, by the ids of their actors.
        self._preempted: set[str] = set()

    @override
    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        # Ray Train wraps the worker's exception together with the traceback.
        causes = {rank: getattr(error, "_base_exc", error) for rank, error in worker_exceptions.items()}
        for cause in causes.values():
            if isinstance(cause, UserError):
                raise ControllerError(cause)
        if lost := _lost_with_machines(causes):
            # Until the end of the notice, Ray Train calls this function with the same errors every few seconds.
            if self._preempted.isdisjoint(lost.values()):
                failure = f"training worker {min(lost)} ended with its preempted machine"
                self._tell_restart(failure, "which does not count", worker_exceptions)
            self._preempted.update(lost.values())
            return
        self._failures += 1
        if not causes:
            return
        failure = _first_failure(causes)
        if self._failures <= self._max_restarts:
            self._tell_restart(failure, f"restart {self._failures} of {self._max_restarts}", worker_exceptions)
        else:
            print(
                f"{self._folder.path.name}: {failure}. No restart is left: placement.max_restarts={self._max_restarts}",
                flush=True,
            )

    def _tell_restart(self, failure: str, count: str, worker_exceptions: Mapping[int, Exception]) -> None:
        newest = self._folder.latest_checkpoint()
        line = (
            f"{failure}. The workers start again, {count}; "
            f"{f'the newest checkpoint is {newest.name}' if newest else 'there is no checkpoint'}"
        )
        with only_printed():
            details = "\n".join(f"worker {one}:\n{error}" for one, error in worker_exceptions.items())
            self._folder.add_failure(line, details)
        print(f"{self._folder.path.name}: {line}. For tracebacks see {self._folder.failures}", flush=True)


def _lost_with_machines(causes: Mapping[int, Exception]) -> dict[int, str]:
    """Return the id of the actor of each worker that was lost with a preempted machine, by the rank of the worker.

    Args:
        causes: exception of each failed worker, by the rank of the worker.
    """
    # Ray Train wraps the loss of an actor.
    losses = {rank: getattr(cause, "health_check_failure", cause) for rank, cause in causes.items()}
    return {
        rank: str(loss.actor_id) for rank, loss in losses.items() if isinstance(loss, RayActorError) and loss.preempted
    }


def _first_failure(causes: Mapping[int, Exception]) -> str:
    """Return the failure of one worker as the start of a message.

    A worker that misses an actor of another worker fails as a consequence, so other errors come first.

    Args:
        causes: exception of each failed worker, by the rank of the worker.
    """
    rank = min(causes, key=lambda rank: (isinstance(causes[rank], RayActorError), rank))
    text = " ".join(f"{type(causes[rank]).__name__}: {causes[rank]}".split())
    return f"training worker {rank} failed ({without_controls(redacted(text))[:_SHOWN]})"


def without_traceback(train: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """Return the function of a worker, changed so that Ray Train logs no traceback of a `UserError`."""

    @functools.wraps(train)
    def run(arguments: dict[str, Any]) -> None:
        try:
            train(arguments)
        except UserError:
            logging.getLogger("ray.train").setLevel(logging.CRITICAL)
            raise

    return run


@contextmanager
def user_errors_unwrapped() -> Iterator[None]:
    """Raise the `UserError` that `WorkerFailures` found, instead of Ray Train's `ControllerError`.

    Raises:
        RayLost: Ray Train's controller, its machine or Ray itself ended, Ray killed the controller for its memory, or
            the cluster had no room for the workers.
    """
    try:
        yield
    except ControllerError as error:
        if isinstance(error.controller_failure, UserError):
            raise error.controller_failure from None
        if isinstance(error.controller_failure, WorkerGroupStartupTimeoutError):
            raise RayLost(
                "after a loss, the cluster had no room for the training workers in time: add machines, or wait longer "
                "for them with placement.wait_for_nodes_s"
            ) from None
        raise
    except OutOfMemoryError as error:
        reason = " ".join(str(error).split())[:_SHOWN]
        raise RayLost(f"the machine has too little memory, so Ray killed processes of the run: {reason}") from None
    except (RayActorError, RaySystemError) as error:
        reason = " ".join(str(error).split())[:_SHOWN]
        raise RayLost(f"Ray ended during the run: {type(error).__name__}: {reason}") from None
