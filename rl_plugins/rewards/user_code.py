"""Border to the code of the user: errors of loading become one line, and a copy made by `os.fork` ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.event_loop import run_in_event_loop

Result = TypeVar("Result")

_MESSAGE_LIMIT = 250
_NO_LOOP = "no running event loop"


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception in one line, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return " ".join("".join(traceback.format_exception_only(error)).split())[:_MESSAGE_LIMIT] + place


def load_user_code(name: str, deed: str, function: Callable[[], Result]) -> Result:
    """Call a function with an import, or a constructor, of the user.

    Some clients must be made while an event loop runs. Code without its event loop is called again inside the event
    loop of this thread, in which the calls of a coroutine function run later.

    Args:
        name: Name of the reward, for the message.
        deed: Description of the call, for the message.
        function: Function to call.

    Raises:
        ConfigError: The call raised an exception or asked for the end of the process.
    """

    async def call() -> Result:
        return function()

    try:
        with only_one_process(name):
            try:
                return function()
            except RuntimeError as error:
                if _NO_LOOP not in str(error):
                    raise
            return run_in_event_loop(call())
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # any error of the user's code
        raise ConfigError(f"reward {name!r}: {deed} failed: {describe(error)}") from error


@contextmanager
def only_one_process(name: str) -> Iterator[None]:
    """End each copy of this process, made by `os.fork` inside the block, at the end of the block.

    A copy would train, or answer for the reward worker, a second time.
    """
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            print(
                f"reward {name!r}: a copy of the process made by os.fork was ended: end the copy with os._exit",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)
