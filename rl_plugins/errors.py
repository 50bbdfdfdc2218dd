"""The errors of the package, by the boundary at which they appear."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can correct. Its message names the cause and the way out.

    The command-line entry points print the message as one line, without a traceback, and exit with status 2.
    """


class ConfigError(UserError, ValueError):
    """A wrong option, file, row or environment, found before anything heavy starts."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that is damaged, or that belongs to another model or strategy."""


class DataError(UserError, RuntimeError):
    """Data that a running step cannot train on."""


class TrainingDiverged(UserError, RuntimeError):
    """Training that passed a bound of the divergence guard."""


class EngineLost(RuntimeError):
    """A rollout engine ended or does not answer. Its unfinished responses are gone."""


class RowError(ConfigError):
    """A malformed row of a data set.

    Attributes:
        where: file and row.
        field: column, or the option and the key that name the field.
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


class RewardError(RuntimeError):
    """Failed rewards in a run: too many samples without a score, or workers unable to score."""


class DeadlineExceeded(TimeoutError):
    """A wait that passed its deadline. The message names the waiting process, its phase, and the awaited event."""


class RunStopped(Exception):
    """A run that was asked to stop before its last step, and has saved a checkpoint.

    The command-line entry points print one line with the option that resumes the run, and exit with status 75, "try
    again later" of sysexits.h.
    """
