"""What becomes of an error in a Ray Train worker: a ConfigError ends the run at once, another is said and written down.

After a ConfigError Ray Train would restart the workers, which mends nothing, and wrap the message in the traceback of
every worker. A `ControllerError` is what it does not retry. After others it restarts them without a word.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ray.train import ControllerError, UserCallback
from typing_extensions import override

from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder

_SHOWN = 300


class WorkerFailures(UserCallback):
    """Runs in Ray Train's controller: no restart after a ConfigError, and none that nobody hears of.

    Args:
        folder: of the run.
        max_restarts: failures after which the workers start again; the error of a later one reaches the user.
    """

    def __init__(self, folder: RunFolder, max_restarts: int) -> None:
        self._folder, self._max_restarts, self._failures = folder, max_restarts, 0

    @override
    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        for error in worker_exceptions.values():
            # Ray Train hands over the worker's exception together with its traceback.
            cause = getattr(error, "_base_exc", error)
            if isinstance(cause, ConfigError):
                raise ControllerError(cause)
        self._failures += 1
        if self._failures <= self._max_restarts and worker_exceptions:
            self._tell(worker_exceptions)

    def _tell(self, worker_exceptions: Mapping[int, Exception]) -> None:
        newest = self._folder.latest_checkpoint()
        rank, error = min(worker_exceptions.items(), key=lambda item: item[0])
        cause = getattr(error, "_base_exc", error)
        said = " ".join(f"{type(cause).__name__}: {cause}".split())[:_SHOWN]
        line = (
            f"training worker {rank} failed ({said}): the workers start again from "
            f"{newest.name if newest else 'the beginning'}, restart {self._failures} of {self._max_restarts}"
        )
        self._folder.add_failure(line, "\n".join(f"worker {one}:\n{error}" for one, error in worker_exceptions.items()))
        print(f"{self._folder.path.name}: {line}; more in {self._folder.failures}", flush=True)


def without_traceback(train: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    """The function of a worker; Ray Train logs no traceback when it raises a ConfigError."""

    @functools.wraps(train)
    def run(arguments: dict[str, Any]) -> None:
        try:
            train(arguments)
        except ConfigError:
            logging.getLogger("ray.train").setLevel(logging.CRITICAL)
            raise

    return run


@contextmanager
def config_errors_unwrapped() -> Iterator[None]:
    """Raise the ConfigError that `WorkerFailures` found instead of Ray Train's error around it."""
    try:
        yield
    except ControllerError as error:
        if isinstance(error.controller_failure, ConfigError):
            raise error.controller_failure from None
        raise
