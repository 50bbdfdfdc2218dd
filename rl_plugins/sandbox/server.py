"""Server of a sandbox of namespaces: a warm Python in a prepared root folder, which forks a child for each program.

    launcher -> server -> supervisor -> reaper -> program

The launcher enters a user namespace, whose users the caller maps, and further namespaces. The server is the process 1
of the launcher's namespace of processes. The root folder has the system's programs and this Python, read-only, and
nothing else. Each supervisor enters a user namespace and a mount namespace of its own, with its own /tmp and /proc. The
reaper is the process 1 of the program's namespace of processes.

A program of Python runs in the fork itself, because a new interpreter would take most of the time. The server has no
secrets in its memory: the server starts with an empty environment, and no program meets the job of another.
"""

from __future__ import annotations

import gc
import io
import os
import select
import signal
import socket
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn, cast

from rl_plugins.sandbox import kernel
from rl_plugins.sandbox.seccomp import filter_calls
from rl_plugins.sandbox.supervisor import (
    Outcome,
    Pipes,
    Supervision,
    become_program,
    highest_descriptor,
    limit_resources,
    read_job,
    report_fault,
    write_answer,
)

OUTER_USER = 65534
"""User of the supervisors and programs in the server's namespace."""
_USER = 1000
# A shared mapping of the real /dev/zero is memory that no limit counts. Reads of /dev/full give zeros, too.
_DEVICES = {"null": "null", "zero": "full", "full": "full", "random": "random", "urandom": "urandom"}
"""Devices of the sandbox, each with the device of the machine."""
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_FILES = {
    "passwd": f"root:x:0:0::/tmp:/bin/sh\nsandbox:x:{_USER}:{_USER}::/tmp:/bin/sh\n",
    "group": f"root:x:0:\nsandbox:x:{_USER}:\n",
}
_WATCHES = {"max_user_namespaces": 0, "max_inotify_instances": 8, "max_inotify_watches": 1024}
"""Limits of the program's user namespace, by the names of files in /proc/sys/user."""
_READ_ONLY = kernel.READ_ONLY_ATTRIBUTE | kernel.NO_SUID_ATTRIBUTE | kernel.NO_DEVICES_ATTRIBUTE
_ROOT_MB = 4
_BEHIND = "/.folders"
"""Folder with the visible folders of /tmp, which a program's own /tmp would hide."""
_WARM = (
    "bisect", "collections", "copy", "ctypes", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "io", "itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string",
    "threading", "time", "traceback", "typing",
)  # fmt: skip
"""Modules of many programs."""

Program = Callable[[], None]


def serve(control: int, caller: int, visible: Sequence[str], root_path: str) -> Program:
    """Serve the caller until its end.

    Args:
        control: descriptor of the connection to the caller.
        caller: number of the caller's process.
        visible: folders and files for programs to see.
        root_path: first entry of `sys.path`, which programs do not get.

    Returns:
        In the process of a program: the function that runs the program. No other process returns.
    """
    connection = socket.socket(fileno=control)
    try:
        watched = os.pidfd_open(caller)
        if os.getppid() != caller:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in _WARM:
            import_module(name)
        _enter_namespaces(connection)
        highest = highest_descriptor()
        _end_with_parent(os.fork(), highest)
        _prepare_root(visible)
        connection.send(b"ready")
    except OSError as error:
        connection.send(f"fault {error.strerror or error}".encode())
        os._exit(1)
    sys.path.remove(root_path)
    gc.collect()
    gc.freeze()
    return _accept_jobs(connection, watched, [path for path in visible if path.startswith("/tmp/")])


def _enter_namespaces(connection: socket.socket) -> None:
    """Enter new namespaces. The caller maps the users of the new user namespace."""
    kernel.unshare(kernel.NEW_USER)
    kernel.process_control(kernel.SET_DUMPABLE, 1)
    connection.send(b"map")
    if connection.recv(16) != b"mapped":
        os._exit(1)
    names = kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_UTS
    kernel.unshare(names | kernel.NEW_CGROUP)


def _end_with_parent(server: int, highest: int) -> None:
    """Let the launcher wait for the server, and let the server end with the launcher.

    Args:
        server: result of `os.fork`.
        highest: highest open descriptor.
    """
    if server:
        os.closerange(3, highest + 1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) & 0xFF)
    kernel.process_control(kernel.PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _prepare_root(visible: Sequence[str]) -> None:
    """Make a root folder in memory, with the visible folders, and nothing else of the machine."""
    # A link of the machine may lead to a folder that the new root folder lacks.
    sources = {path: os.path.realpath(path) for path in visible}
    kernel.mount("none", "/", "", kernel.RECURSIVE | kernel.PRIVATE)
    flags = kernel.NO_SUID | kernel.NO_DEVICES
    # The old root folder stays complete under /old, also if a visible folder is in /tmp.
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, "mode=755,size=1m")
    os.mkdir("/tmp/new")
    os.mkdir("/tmp/old")
    kernel.mount("tmpfs", "/tmp/new", "tmpfs", flags, f"mode=755,size={_ROOT_MB}m")
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for path, source in sources.items():
        _show(path, source)
    for folder in ("dev", "etc", "proc", "tmp"):
        os.makedirs(f"/new/{folder}", exist_ok=True)
    for name, source in _DEVICES.items():
        _bind(f"/old/dev/{source}", f"/new/dev/{name}")
        attributes = kernel.READ_ONLY_ATTRIBUTE | kernel.NO_SUID_ATTRIBUTE | kernel.NO_EXEC_ATTRIBUTE
        kernel.set_mount_attributes(f"/new/dev/{name}", attributes, recursive=False)
    for name, target in {**_LINKS, "shm": "/tmp"}.items():
        os.symlink(target, f"/new/dev/{name}")
    for name, text in _FILES.items():
        with open(f"/new/etc/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    kernel.mount("proc", "/new/proc", "proc", flags | kernel.NO_EXEC)
    kernel.detach("/old")
    os.chdir("/new")
    kernel.pivot_root(".", ".")
    kernel.detach(".")
    os.chdir("/")
    kernel.set_mount_attributes("/", _READ_ONLY, recursive=False)


def _show(path: str, source: str) -> None:
    """Show a folder or a file of the machine in the new root folder, read-only. `source` is the path without links."""
    old, new = f"/old{source}", f"/new{_BEHIND if path.startswith('/tmp/') else ''}{path}"
    if os.path.lexists(new) or not os.path.exists(old):
        return
    _bind(old, new)
    kernel.set_mount_attributes(new, _READ_ONLY, recursive=True)


def _bind(old: str, new: str) -> None:
    if os.path.isdir(old):
        os.makedirs(new, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(new), exist_ok=True)
        with open(new, "x", encoding="utf-8"):
            pass
    kernel.mount(old, new, "", kernel.BIND | kernel.RECURSIVE)


def _accept_jobs(connection: socket.socket, caller: int, temporary: Sequence[str]) -> Program:
    """Fork a supervisor for each connection that the caller sends, until the caller closes or ends.

    Args:
        connection: connection to the caller.
        caller: descriptor of the caller's process.
        temporary: visible folders in /tmp.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(caller, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if caller in ready:
            os._exit(0)
        _, channels, _, _ = socket.recv_fds(connection, 16, 1)
        if not channels:
            os._exit(0)
        try:
            supervisor = os.fork()
        except OSError as error:
            # Other programs go on.
            with suppress(BrokenPipeError, ConnectionResetError):
                write_answer(channels[0], {"fault": f"no process for the program: {error.strerror}"}, b"", b"")
        else:
            if supervisor == 0:
                os.close(connection.detach())
                os.close(caller)
                return _supervise(channels[0], temporary)
        os.close(channels[0])
        _forget_ended_children()


def _forget_ended_children() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# For each program ---------------------------------------------------------------------------------------------------


def _supervise(channel: int, temporary: Sequence[str]) -> Program:
    """Run one job: this process supervises, and only the process of the program returns."""
    try:
        job, stdin = read_job(channel)
    except EOFError:
        os._exit(0)
    limits = job["limits"]
    try:
        _enter_own_namespaces(int(limits["disk_mb"]), temporary)
        pipes = Pipes.new()
        reaper = os.fork()
    except OSError as error:
        _answer(channel, Outcome({"fault": error.strerror or str(error)}, b"", b""))
    if reaper == 0:
        os.close(channel)
        return _reap(job, pipes)
    pipes.close_program_ends()

    def end_all() -> None:
        os.kill(reaper, signal.SIGKILL)
        os.waitpid(reaper, 0)

    # In its own /proc, the reaper has the number 1.
    outcome = Supervision(pipes, 1, limits, stdin, channel).run(end_all)
    if outcome is None:
        os._exit(0)
    _answer(channel, outcome)


def _answer(channel: int, outcome: Outcome) -> NoReturn:
    with suppress(BrokenPipeError, ConnectionResetError):
        write_answer(channel, outcome.answer, outcome.stdout, outcome.stderr)
    os._exit(0)


def _enter_own_namespaces(disk_mb: int, temporary: Sequence[str]) -> None:
    """Enter a user namespace, a mount namespace with an empty /tmp, and for children a namespace of processes."""
    if os.geteuid() != OUTER_USER:
        os.setgroups([])
        os.setresgid(OUTER_USER, OUTER_USER, OUTER_USER)
        os.setresuid(OUTER_USER, OUTER_USER, OUTER_USER)
    kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS | kernel.NEW_PIDS)
    kernel.process_control(kernel.SET_DUMPABLE, 1)  # Otherwise /proc/self belongs to root.
    for name, text in (
        ("setgroups", "deny"),
        ("gid_map", f"{_USER} {OUTER_USER} 1"),
        ("uid_map", f"{_USER} {OUTER_USER} 1"),
    ):
        _write(f"/proc/self/{name}", text)
    kernel.process_control(kernel.SET_DUMPABLE, 0)
    flags = kernel.NO_SUID | kernel.NO_DEVICES
    kernel.mount("tmpfs", "/tmp", "tmpfs", flags, f"mode=700,size={disk_mb}m,nr_inodes=8192")
    for path in temporary:
        _bind(f"{_BEHIND}{path}", path)


def _reap(job: Mapping[str, Any], pipes: Pipes) -> Program:
    """Mount /proc of the new namespace of processes, and fork the program. Only the program returns."""
    try:
        flags = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
        kernel.mount("proc", "/proc", "proc", flags)
        # Without memory on the machine, the kernel ends programs before anything else.
        kernel.process_control(kernel.SET_DUMPABLE, 1)
        _write("/proc/self/oom_score_adj", "1000")
        kernel.process_control(kernel.SET_DUMPABLE, 0)
        for name, value in _WATCHES.items():
            _write(f"/proc/sys/user/{name}", str(value))
        kernel.set_mount_attributes("/proc", kernel.READ_ONLY_ATTRIBUTE, recursive=False)
        become_program(pipes)
        return _become_job(job, pipes)
    except OSError as error:
        report_fault(pipes, error)


def _become_job(job: Mapping[str, Any], pipes: Pipes) -> Program:
    """Give up all rights, and run the program: another interpreter at once, and Python in the returned function."""
    file_name, interpreter = str(job["file_name"]), job["interpreter"]
    os.chdir("/tmp")
    with open(file_name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(job["program"])
    pipes.become_standard()
    os.setsid()
    # The supervisor and the reaper count as processes of the program's user.
    limit_resources(job["limits"], int(job["limits"]["processes"]) + 2)
    kernel.drop_capabilities()
    kernel.process_control(kernel.SET_DUMPABLE, 1)
    filter_calls()
    if interpreter is None:
        os.close(pipes.status[1])
        return _python_program(file_name, job["program"])
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(interpreter[0], [*interpreter, file_name])
    except OSError as error:
        raise OSError(error.errno, f"{interpreter[0]}: {error.strerror}") from None


def _python_program(file_name: str, text: str) -> Program:
    """Return a function that runs a program of Python as `python FILE` does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    path = f"/tmp/{file_name}"
    sys.argv[:] = [path]
    sys.path.insert(0, "/tmp")
    for name in [name for name in sys.modules if name.partition(".")[0] == "rl_plugins"]:
        del sys.modules[name]
    sys.stdin = sys.__stdin__ = _stream(0, "r", "surrogateescape")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w", "surrogateescape")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w", "backslashreplace")  # type: ignore[misc]
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    sys.modules["__main__"] = module
    show = sys.excepthook

    def show_own_frames(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_own_frames

    def run() -> None:
        # The program has none of the `__future__` imports of this file.
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)

    return run


def _stream(number: int, mode: str, errors: str) -> io.TextIOWrapper:
    buffering = 1 if number == 2 else -1
    return cast(io.TextIOWrapper, open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False))


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, f"{path}: {error.strerror}") from None
