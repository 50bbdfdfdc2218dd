"""Signals of a command: SIGTERM, SIGHUP and Ctrl-C end the command with one line and the status of a shell."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_DESCRIPTORS = (1, 2)


class EndingSignals:
    """Signals that have asked the command to end, oldest first."""

    def __init__(self) -> None:
        self.received: list[int] = []

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
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


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
