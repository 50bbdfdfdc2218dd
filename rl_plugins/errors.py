"""Errors that a user can mend: one message that names the thing at fault and the way out."""


class ConfigError(ValueError):
    """A wrong option, file, row or environment, found before anything heavy starts.

    The command-line entry points print it as one line, without a traceback, and exit with status 2.
    """


class DeadlineExceeded(TimeoutError):
    """A wait outlasted its deadline. The message names who waited, in which phase, and for what."""


class RunStopped(Exception):
    """The run ended before its last step, in good order: it was asked to. The message says how it goes on.

    The command-line entry points print it as one line and exit with status 75, "try again later" of sysexits.h.
    """
