"""Sandbox of Linux namespaces, seen from the caller: start of the server, and a connection for each program."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.sandbox.records import SandboxError, SandboxJob, SandboxResult, result_of
from rl_plugins.sandbox.seccomp import has_filter

START_S = 60.0
"""Seconds for the start of a sandbox."""
_END_S = 2.0
GRACE_S = 10.0
"""Seconds beyond the wall time of a program until a silent sandbox counts as failed."""
_OUTER_USER = 65534
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")
_ROOT_PATH = str(Path(__file__).resolve().parents[2])


def environment_of_programs() -> dict[str, str]:
    """Return the environment of programs: nothing of the caller but the path of shared libraries."""
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        # The same program prints the same text again, and number crunching takes one thread.
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return environment


def visible_folders(folders: Sequence[str]) -> list[str]:
    """Return the folders of programs: system, Python with its packages, and further folders.

    Raises:
        ConfigError: a folder does not exist, or holds the home folder.
    """
    for folder in folders:
        if not os.path.isabs(folder) or not os.path.exists(folder):
            raise ConfigError(f"folders: {folder!r} is no existing absolute path: correct the path, or leave it out")
    python = {sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])}
    home = os.path.realpath(os.path.expanduser("~"))
    for folder in (*_SYSTEM, *python, *folders):
        if folder == "/" or f"{home}/".startswith(f"{os.path.realpath(folder)}/"):
            raise ConfigError(
                f"programs in the sandbox would see {folder}, which holds the home folder {home}: use a Python in a "
                "folder of its own, or set sandbox to the address of a server, or to the command of a container"
            )
    # A folder comes before the folders inside.
    return [*_SYSTEM, *sorted(python | set(folders), key=len)]


class Namespaces:
    """Sandbox of namespaces on this machine.

    Args:
        folders: further folders for programs to read.

    Raises:
        SandboxError: the machine does not allow such a sandbox.
        ConfigError: a folder is wrong.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        if sys.platform != "linux" or not has_filter():
            raise SandboxError("only Linux on x86-64 or ARM64 has this sandbox")
        self._visible = visible_folders(folders)
        self._lock = threading.Lock()
        self._owner, self._closed = os.getpid(), False
        self._start()

    def _start(self) -> None:
        self._control, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = f"{server_socket.fileno()}, {os.getpid()}, {self._visible!r}, {_ROOT_PATH!r}"
        text = (
            f"import sys; sys.path.insert(0, {_ROOT_PATH!r}); from rl_plugins.sandbox.server import serve; "
            f"serve({arguments})()"
        )
        with server_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", text],
                env=environment_of_programs(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[server_socket.fileno()],
                start_new_session=True,
                cwd="/",
            )
        try:
            self._await_server()
        except BaseException:
            self._end()
            raise

    def _await_server(self) -> None:
        """Map the users of the server's namespace, and wait until the server is ready.

        Raises:
            SandboxError: the server did not start.
        """
        self._control.settimeout(START_S)
        try:
            while (message := self._control.recv(4096)) == b"map":
                self._map_users()
                self._control.send(b"mapped")
        except TimeoutError:
            raise SandboxError(f"the sandbox did not start within {START_S:g} s") from None
        except OSError as error:
            raise SandboxError(f"the kernel refused: {error.strerror}") from None
        self._control.settimeout(None)
        if message != b"ready":
            reason = message.decode().removeprefix("fault ") or "the server ended at its start"
            raise SandboxError(f"the kernel refused: {reason}")

    def _map_users(self) -> None:
        """Map root, if this is root, and the user of programs. Programs never run as root."""
        folder = Path(f"/proc/{self._process.pid}")
        user, group = os.geteuid(), os.getegid()
        if user == 0:
            # Programs are the user nobody, also for the machine.
            users = groups = f"0 0 1\n{_OUTER_USER} {_OUTER_USER} 1\n"
        else:
            users, groups = f"{_OUTER_USER} {user} 1\n", f"{_OUTER_USER} {group} 1\n"
            (folder / "setgroups").write_text("deny", encoding="ascii")
        (folder / "gid_map").write_text(groups, encoding="ascii")
        (folder / "uid_map").write_text(users, encoding="ascii")

    def run(self, job: SandboxJob) -> SandboxResult:
        """Run a program; run the program again if the server ended meanwhile.

        Raises:
            SandboxError: the sandbox failed.
        """
        server = self._process
        try:
            return self._attempt(job)
        except EOFError:
            if not self._has_ended(server):
                raise SandboxError("the sandbox ended in the run of a program") from None
        try:
            return self._attempt(job)
        except EOFError:
            raise SandboxError("the sandbox ended twice in the run of a program") from None

    def _attempt(self, job: SandboxJob) -> SandboxResult:
        """Run a program.

        Raises:
            EOFError: the supervisor of the program, or the server, ended.
            SandboxError: the sandbox failed in another way.
        """
        own_socket, supervisor_socket = socket.socketpair()
        with own_socket:
            with supervisor_socket:
                self._send(supervisor_socket)
            own_socket.settimeout(job.limits.wall_s + GRACE_S)
            try:
                # A server without a process for the program has answered, and closed the connection.
                with suppress(BrokenPipeError):
                    own_socket.sendall(job_bytes(job))
                with own_socket.makefile("rb") as file:
                    return read_answer(file.read)
            except TimeoutError:
                raise SandboxError("the sandbox gave no outcome in time") from None
            except OSError:
                raise EOFError from None

    def _send(self, channel: socket.socket) -> None:
        """Send a connection to the server. A new server takes the place of an ended one."""
        with self._lock:
            if self._closed:
                raise SandboxError("the sandbox was closed")
            try:
                socket.send_fds(self._control, [b"job"], [channel.fileno()])
            except OSError:
                self._end()
                self._start()
                socket.send_fds(self._control, [b"job"], [channel.fileno()])

    def _has_ended(self, server: subprocess.Popen[bytes]) -> bool:
        """Return True if a server has ended, also if another thread has already started the next one."""
        with self._lock:
            try:
                return self._closed or server is not self._process or not self._control.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True

    def close(self) -> None:
        """End the server and all programs."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        self._control.close()
        if self._owner != os.getpid():
            return
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def job_bytes(job: SandboxJob) -> bytes:
    """Return a job in the form of a supervisor."""
    text = json.dumps(job.plain()).encode()
    stdin = job.stdin.encode("utf-8", "surrogatepass")
    return b"%11d %11d\n" % (len(text), len(stdin)) + text + stdin


def read_answer(read: Callable[[int], bytes]) -> SandboxResult:
    """Read the answer of a supervisor.

    Args:
        read: function that returns a number of bytes, or fewer at the end.

    Raises:
        EOFError: the answer is incomplete.
        SandboxError: the answer is a fault.
    """
    head = read(36)
    if len(head) < 36:
        raise EOFError
    sizes = [int(size) for size in head.split()]
    text, stdout, stderr = parts = [read(size) for size in sizes]
    if [len(part) for part in parts] != sizes:
        raise EOFError
    try:
        answer = json.loads(text)
    except ValueError:
        raise EOFError from None
    outputs = {"stdout": stdout.decode(errors="replace"), "stderr": stderr.decode(errors="replace")}
    return result_of({**answer, **outputs})
