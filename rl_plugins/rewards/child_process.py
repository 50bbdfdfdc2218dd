"""Child process of this process with a connection.

A child process is the leader of its own group of processes, and the whole group is killed. The kernel also kills a
child process at the end of the thread of its start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait

START_S = 60.0
"""Seconds for the start of Python and of its imports, beside the time for the code of the user."""
_PR_SET_PDEATHSIG = 1
_IMPORT = "from rl_plugins.rewards.child_process import enter"


class ChildProcess:
    """A started process.

    Args:
        module: module whose function `serve` runs in the process, with the connection as its argument.
        environment: variables of the process.

    Attributes:
        pid: number of the process.
        connection: this process's end of the connection.
        ended: file descriptor that is readable after the end of the process. The end of a process is no end of the
            connection, if a copy of the process lives on.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.connection, child_connection = Pipe()
        with child_connection:
            start = f"enter({module!r}, {child_connection.fileno()}, {os.getpid()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {_IMPORT}; {start}"],
                env=environment,
                pass_fds=[child_connection.fileno()],
                # Not a session, which Linux would schedule as a group of its own: the process could wait for long.
                process_group=0,
            )
        self.pid = self._process.pid
        self.ended = os.pidfd_open(self.pid)

    def has_ended(self) -> bool:
        """Return True if the process has ended."""
        return bool(wait([self.ended], 0))

    def describe_end(self) -> str:
        """Describe the end of the process."""
        wait([self.ended], 1.0)
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return "closed its connection"
        return described(status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)

    def kill(self) -> None:
        """End the process and all processes of its group."""
        if self._process.returncode is not None:
            return
        # The process is still a zombie at least, so no other group can have its number.
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        os.close(self.ended)


def described(exit_code: int) -> str:
    """Describe the end of a process by its exit status, or by the number of a signal as a negative number."""
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    return f"was ended by the signal {signal.Signals(-exit_code).name}"


def end_with_parent(parent: int) -> bool:
    """Let the kernel kill this process at the end of its parent; return False if the parent has ended already.

    Args:
        parent: number of the parent process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def enter(module: str, descriptor: int, parent: int) -> None:
    """Call `serve` of a module in the child process.

    Args:
        module: name of the module.
        descriptor: file descriptor of the connection.
        parent: number of the parent process.
    """
    if not end_with_parent(parent):
        return
    os.set_inheritable(descriptor, False)
    import_module(module).serve(Connection(descriptor))
