"""Child process of this process with a connection.

A child process has a keeper, which ends all processes that the child process has started: after the end of the child
process, after `kill`, and after the end of the thread of its start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait

from rl_plugins.rewards.keeper import go_on_under_keeper

START_S = 60.0
"""Seconds for the start of Python and of its imports, beside the time for the code of the user."""
_END_S = 10.0
"""Seconds for the end of all processes."""
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="starts of processes")
"""Thread for starts by other threads than the main thread, which may end before the child process."""
_IMPORT = "from rl_plugins.rewards.child_process import enter"


class ChildProcess:
    """A started process.

    Args:
        module: module whose function `serve` runs in the process, with the connection as its argument.
        environment: variables of the process.

    Attributes:
        pid: number of the keeper.
        connection: this process's end of the connection.
        ended: file descriptor that is readable after the end of the process and of all its processes.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.connection, child_connection = Pipe()
        with child_connection:
            start = f"enter({module!r}, {child_connection.fileno()}, {os.getpid()})"
            started = partial(
                subprocess.Popen,
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {_IMPORT}; {start}"],
                env=environment,
                pass_fds=[child_connection.fileno()],
                # Not a session, which Linux would schedule as a group of its own: the process could wait for long.
                process_group=0,
            )
            in_main_thread = threading.current_thread() is threading.main_thread()
            self._process = started() if in_main_thread else _STARTER.submit(started).result()
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
        """End the process and all its processes."""
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            # The kernel holds a process, for example in a call of a driver.
            self._process.kill()
            self._process.wait()
        self.connection.close()
        os.close(self.ended)


def described(exit_code: int) -> str:
    """Describe the end of a process by its exit status, or by the number of a signal as a negative number."""
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    return f"was ended by the signal {signal.Signals(-exit_code).name}"


def enter(module: str, descriptor: int, parent: int) -> None:
    """Call `serve` of a module in the child process.

    Args:
        module: name of the module.
        descriptor: file descriptor of the connection.
        parent: number of the parent process.
    """
    if not go_on_under_keeper(parent):
        return
    os.set_inheritable(descriptor, False)
    import_module(module).serve(Connection(descriptor))
