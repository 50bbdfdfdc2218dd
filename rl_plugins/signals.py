"""Signals of a command: SIGTERM, SIGHUP and Ctrl-C end the command with one line and the status of a shell.

During training, the first SIGTERM or SIGHUP asks the workers to save the running step and end.
"""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import ClassVar

from rl_plugins.errors import RunStopped, StorageError
from rl_plugins.run_folder import RunFolder
from rl_plugins.whole_file import write_whole_text

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_DESCRIPTORS = (1, 2)


class EndingSignals:
    """Signals with a request to end the command, oldest first.

    Attributes:
        received: numbers of signals for an end at once.
        requests: names of signals for an end of a run after its step.
    """

    current: ClassVar[EndingSignals | None] = None

    def __init__(self) -> None:
        self.received: list[int] = []
        self.requests: list[str] = []

    @property
    def name(self) -> str:
        """Name of the first signal. Without a signal, somebody has raised `KeyboardInterrupt`, as Ctrl-C does."""
        return signal.Signals(self.received[0] if self.received else signal.SIGINT).name

    @property
    def status(self) -> int:
        """Exit status after the first signal, like a shell."""
        return 128 + signal.Signals[self.name]

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise `KeyboardInterrupt` for the first signal, and end the process at the second."""
        if number == signal.SIGHUP:
            detach_from_terminal()
        self.received.append(number)
        if len(self.received) > 1:
            # The signal can interrupt a print, and `print` is not reentrant.
            os.write(2, f"{signal.Signals(number).name} again: ended at once\n".encode())
            os._exit(128 + number)
        raise KeyboardInterrupt


@contextmanager
def ending_signals() -> Iterator[EndingSignals]:
    """Let SIGTERM, SIGHUP and SIGINT raise `KeyboardInterrupt` inside this context, in the main thread only.

    A signal that the process ignores, such as SIGHUP under nohup, stays ignored.
    """
    signals = EndingSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: handler for number in _ENDING if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, signals.end)
    EndingSignals.current = signals
    try:
        yield signals
    finally:
        EndingSignals.current = None
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        # Python marks a `KeyboardInterrupt` out of `exec`, such as in the making of a dataclass, as not handled, and
        # ends the process with SIGINT in place of its status. The next `exec` clears the mark.
        exec("")


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Set the handlers of this process again after a call that replaces them, as the start of Ray does.

    Processes started inside this context do not get SIGHUP: a closed terminal sends SIGHUP to all processes of the
    command, and Ray's processes must live until the run is saved.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _ENDING}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def detach_from_terminal() -> None:
    """Send output for a closed terminal nowhere: a write to this terminal would fail."""
    terminals = [descriptor for descriptor in _DESCRIPTORS if os.isatty(descriptor)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in terminals:
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def stop_on_signals(folder: RunFolder) -> Iterator[None]:
    """Let the first SIGTERM or SIGHUP inside this context create the file `stop`. Only in the main thread.

    After the first signal, the previous handlers are in place again. An ignored SIGHUP stays ignored. If the file
    cannot be written, the previous handler gets the signal.
    """
    requests = [signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        requests.remove(signal.SIGHUP)
    # After the first Ctrl-C, Lightning ignores SIGINT, and a second Ctrl-C could not end the process.
    previous = {number: signal.getsignal(number) or signal.SIG_DFL for number in (*requests, signal.SIGINT)}
    folder.path.mkdir(parents=True, exist_ok=True)

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def request_stop(number: int, frame: FrameType | None) -> None:
        restore()
        name = signal.Signals(number).name
        if EndingSignals.current is not None:
            EndingSignals.current.requests.append(name)
        if number == signal.SIGHUP:
            detach_from_terminal()
        failure = None
        try:
            write_whole_text(folder.stop, name)
        except StorageError as error:
            failure = error
        end = "ending after this step" if failure is None else f"ending at once: {failure}"
        # The signal can interrupt a print, and `print` is not reentrant.
        os.write(2, f"{folder.path.name}: {name}: {end}\n".encode())
        if failure is not None:
            # Without the file, no worker hears of the request.
            os.kill(os.getpid(), number)

    for number in requests:
        signal.signal(number, request_stop)
    try:
        yield
    finally:
        restore()


def stop_before_next(name: str) -> None:
    """End the command before the next run if a signal came while the run before ended.

    Args:
        name: name of the next run.

    Raises:
        RunStopped: a signal asked for the end.
    """
    if EndingSignals.current is not None and EndingSignals.current.requests:
        raise RunStopped(f"{name}: stopped before the start: {EndingSignals.current.requests[0]}")


def remove_request(stop: Path, *, before: float = math.inf) -> None:
    """Remove the file `stop` of an earlier run, or an empty folder of this name.

    A request since `before`, in seconds since the epoch, ends the run. A request that cannot be removed ends each run
    before its first step, with the path as the reason.
    """
    with suppress(OSError):
        if stop.stat().st_mtime < before:
            remove = Path.rmdir if stop.is_dir() else Path.unlink
            remove(stop)
