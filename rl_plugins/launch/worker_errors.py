"""A ConfigError in a Ray Train worker ends the run at once and reaches the user as it is.

Ray Train would restart the workers, which mends nothing, and wrap the message in the traceback of every worker. A
`ControllerError` is what it does not retry.
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


class StopOnConfigError(UserCallback):
    """Runs in Ray Train's controller: no restart after a ConfigError."""

    @override
    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        for error in worker_exceptions.values():
            # Ray Train hands over the worker's exception together with its traceback.
            cause = getattr(error, "_base_exc", error)
            if isinstance(cause, ConfigError):
                raise ControllerError(cause)


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
    """Raise the ConfigError that `StopOnConfigError` found instead of Ray Train's error around it."""
    try:
        yield
    except ControllerError as error:
        if isinstance(error.controller_failure, ConfigError):
            raise error.controller_failure from None
        raise
