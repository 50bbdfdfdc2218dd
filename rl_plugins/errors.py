"""Errors that a user can mend: one message that names the thing at fault and the way out."""

from __future__ import annotations


class ConfigError(ValueError):
    """A wrong option, file, row or environment, found before anything heavy starts.

    The command-line entry points print it as one line, without a traceback, and exit with status 2.
    """


class RowError(ConfigError):
    """A malformed row of a data set.

    Attributes:
        where: the file and the row.
        field: the column, or the option and the key under which it was looked for.
        reason: what is wrong there.
    """

    def __init__(self, where: str, field: str, reason: str) -> None:
        super().__init__(f"{where}, {field}: {reason}")
        self.where = where
        self.field = field
        self.reason = reason

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str, str]]:
        """Pickled as its parts: Ray carries errors from process to process."""
        return RowError, (self.where, self.field, self.reason)


class DeadlineExceeded(TimeoutError):
    """A wait outlasted its deadline. The message names who waited, in which phase, and for what."""


class RunStopped(Exception):
    """The run ended before its last step, in good order: it was asked to, and has saved.

    The command-line entry points print it as one line, with how the run goes on, and exit with status 75, "try again
    later" of sysexits.h.
    """
