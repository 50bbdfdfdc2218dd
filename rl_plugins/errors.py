"""Errors of the package, one class for each boundary."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rl_plugins.redaction import redacted


class UserError(Exception):
    """An error that the user can correct. The message names the cause and the way out.

    The command-line entry points print the message as one line, without a traceback, and exit with status 2. The
    message has no secrets and no control characters.
    """

    def __str__(self) -> str:
        """Return the message as one line without secrets: control characters of data are written as escapes."""
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in redacted(super().__str__()))


class ConfigError(UserError, ValueError):
    """A wrong option, argument, file, row or environment, or a call that the present state forbids."""


@contextmanager
def config_errors(beginning: str) -> Iterator[None]:
    """Begin the message of each `ConfigError` raised inside this context with a text."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{beginning}{error}") from None


class CheckpointError(UserError, RuntimeError):
    """A damaged checkpoint, or a checkpoint of another model or strategy."""


class DataError(UserError, RuntimeError):
    """Data that a run cannot train on: a batch without usable samples, or no data at all."""


class StorageError(UserError, RuntimeError):
    """A failed write: the disk is full, or the folder is read-only."""


class TrainingDiverged(UserError, RuntimeError):
    """Training passed a bound of the divergence guard."""


class EngineLost(RuntimeError):
    """A rollout engine ended or does not answer. Unfinished responses of the engine are lost."""


class RowError(ConfigError):
    """A malformed row of a data set.

    Attributes:
        where: file and row.
        field: column, or the option and the key with the column's name.
        reason: description of the fault.
    """

    def __init__(self, where: str, field: str, reason: str) -> None:
        super().__init__(f"{where}, {field}: {reason}")
        self.where = where
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str, str]]:
        """Pickle the arguments, because Ray carries errors from process to process."""
        return RowError, (self.where, self.field, self.reason)


class RewardError(UserError, RuntimeError):
    """Failed rewards in a run: too many samples without a score, workers unable to score, or a missing number.

    A restart from the last checkpoint would score the same samples again, so this error ends the run.
    """


class DeadlineExceeded(TimeoutError):
    """A wait passed its deadline. The message names the waiting process, its phase, and the awaited event."""


class RayLost(RuntimeError):
    """Ray did not start, or Ray or its process that leads the training ended. A resumed run loses no checkpoint.

    The command-line entry points print the message as one line, and exit with status 69 ("unavailable" in sysexits.h).
    """


class RunStopped(Exception):
    """A run was asked to stop before its last step, and has saved a checkpoint.

    The command-line entry points print one line with the option for a resume, and exit with status 75 ("try again
    later" in sysexits.h).
    """


@contextmanager
def user_errors_of_tasks() -> Iterator[None]:
    """Raise the `UserError` of a Ray task or actor, instead of Ray's error with the traceback of another process."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
