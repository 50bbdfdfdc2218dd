"""Keeper of a process with code of the user: all processes that the code starts end with the kept process.

    parent -> keeper -> kept process -> further processes, also in sessions of their own

The keeper inherits processes without a parent, and collects them after their end. The kept process collects its own
child processes, whose exit statuses the code of the user may ask for. The end of the parent also ends all processes.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from typing import NoReturn

from rl_plugins.sandbox import supervisor

_SIGNALS = {signal.SIGCHLD, signal.SIGTERM}


def go_on_under_keeper(parent: int) -> bool:
    """Make this process a keeper, and go on in its child process, the leader of a process group.

    SIGTERM to the keeper ends all processes. The keeper ends last, with the exit status of the kept process. This
    process must have one thread.

    Args:
        parent: number of the parent process.

    Returns:
        True in the kept process; False if the parent or the keeper has ended already.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    ctypes.CDLL(None).prctl(supervisor.CHILD_SUBREAPER, 1)
    if not end_with_parent(parent, signal.SIGTERM):
        return False
    keeper = os.getpid()
    # A process that ignores SIGCHLD gets no exit status. The change after the fork would discard a pending SIGCHLD.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if kept := os.fork():
        _keep(kept)
    signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    return end_with_parent(keeper)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Let the kernel send a signal to this process at the end of its parent; return False if the parent has ended.

    Args:
        parent: number of the parent process.
        number: number of the signal.
    """
    supervisor.end_with_parent(number)
    return os.getppid() == parent


def _keep(kept: int) -> NoReturn:
    """Wait for the end of the kept process or for SIGTERM, end all other processes, and end this process."""
    # The other end of a connection notices the end of the kept process.
    os.closerange(3, supervisor.highest_descriptor() + 1)
    status: int | None = None
    while status is None:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            status = signal.SIGKILL
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status = ended[1] if ended[0] == kept else status
    supervisor.end_children()
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-exit_code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), -exit_code)
    os._exit(exit_code)
