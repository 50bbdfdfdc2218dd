"""Supervision of one program: pipes, limits, the end of all its processes, and the outcome.

    supervisor -> reaper -> program -> further processes of the program

The supervisor feeds the standard input, reads the output, and counts time and memory of all processes. The reaper
inherits processes without a parent, and reports the end of the program. In a sandbox of namespaces, the reaper has the
number 1, and its end is the end of all processes. Elsewhere the supervisor ends them one by one.

Also the program of a sandbox by command: `python3 -c TEXT`, where TEXT is this file, gets a job on its standard input,
and answers on its standard output. So this file needs only the standard library of Python 3.9. The argument
`own-processes` says that all processes of this user are visible: the kernel then limits their number.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

OWN_PROCESSES = "own-processes"
_TICK_S = 0.02
_CHUNK = 65536
_MIB = 2**20
CHILD_SUBREAPER, _SET_DUMPABLE, _PARENT_DEATH_SIGNAL = 36, 4, 1
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def read_exactly(descriptor: int, size: int) -> bytes:
    """Read a number of bytes.

    Raises:
        EOFError: the end came before.
    """
    content = bytearray()
    while len(content) < size:
        chunk = os.read(descriptor, min(size - len(content), 2**20))
        if not chunk:
            raise EOFError
        content += chunk
    return bytes(content)


def read_job(descriptor: int) -> tuple[dict[str, Any], bytes]:
    """Read a job: two sizes, the job in JSON, and the standard input of the program."""
    size, stdin_size = (int(word) for word in read_exactly(descriptor, 24).split())
    return json.loads(read_exactly(descriptor, size)), read_exactly(descriptor, stdin_size)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all bytes."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def write_answer(descriptor: int, answer: Mapping[str, Any], stdout: bytes, stderr: bytes) -> None:
    """Write an answer: three sizes, the answer in JSON, standard output, and standard error."""
    text = json.dumps(answer).encode()
    sizes = b"%11d %11d %11d\n" % (len(text), len(stdout), len(stderr))
    write_all(descriptor, sizes + text + stdout + stderr)


def highest_descriptor() -> int:
    """Return the highest open descriptor of this process. The limit of open files may be a billion."""
    return max(map(int, os.listdir("/proc/self/fd")))


def limit_resources(limits: Mapping[str, float], processes: int | None) -> None:
    """Set the limits of this process and its children.

    Args:
        limits: fields of SandboxLimits.
        processes: processes of this user; None sets no limit.
    """
    wanted = {
        # The supervisor counts more exactly.
        resource.RLIMIT_CPU: math.ceil(limits["cpu_s"]) + 1,
        resource.RLIMIT_DATA: int(limits["memory_mb"] * _MIB),
        resource.RLIMIT_FSIZE: int(limits["file_mb"] * _MIB),
        resource.RLIMIT_NOFILE: int(limits["open_files"]),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: _CHUNK,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    if processes is not None:
        wanted[resource.RLIMIT_NPROC] = processes
    for kind, asked in wanted.items():
        largest = resource.getrlimit(kind)[1]
        value = min(asked, 2**63 - 1 if largest == resource.RLIM_INFINITY else largest)
        resource.setrlimit(kind, (value, value))


@dataclass
class Pipes:
    """Pipes of a program: for each pipe the supervisor's end, and the program's end.

    Attributes:
        stdin: standard input.
        stdout: standard output.
        stderr: standard error.
        status: report of the reaper: a line at the start, and the exit status. The program never has this pipe.
    """

    stdin: tuple[int, int]
    stdout: tuple[int, int]
    stderr: tuple[int, int]
    status: tuple[int, int]

    @classmethod
    def new(cls) -> Pipes:
        """Return new pipes."""
        read_stdin, write_stdin = os.pipe()
        return cls((write_stdin, read_stdin), os.pipe(), os.pipe(), os.pipe())

    def become_standard(self) -> None:
        """Make the program's ends the standard streams of this process, and close all other descriptors."""
        for number, (_, program_end) in enumerate((self.stdin, self.stdout, self.stderr)):
            os.dup2(program_end, number)
        status = self.status[1]
        os.closerange(3, status)
        os.closerange(status + 1, highest_descriptor() + 1)

    def close_program_ends(self) -> None:
        """Close the program's ends."""
        for _, program_end in (self.stdin, self.stdout, self.stderr, self.status):
            os.close(program_end)

    def close_supervisor_ends(self) -> None:
        """Close the supervisor's ends."""
        for supervisor_end, _ in (self.stdin, self.stdout, self.stderr, self.status):
            os.close(supervisor_end)


def become_program(pipes: Pipes) -> None:
    """Fork the program from this process, which becomes the reaper. Only the program returns."""
    pipes.close_supervisor_ends()
    end_with_parent()
    os.write(pipes.status[1], b"\n")
    child = os.fork()
    if child == 0:
        end_with_parent()
        return
    # The end of a killed supervisor is the end of its answer.
    os.closerange(0, 3)
    while True:
        ended, status = os.wait()
        if ended == child:
            os.write(pipes.status[1], b"%d" % os.waitstatus_to_exitcode(status))
            os._exit(0)


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process at the end of its parent, also if a program kills the parent."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number, 0, 0, 0)


def report_fault(pipes: Pipes, error: OSError) -> NoReturn:
    """Report an error before the start of the program, and end this process."""
    os.write(pipes.status[1], f"fault {error.strerror or error}\n".encode())
    os._exit(1)


# Counting -----------------------------------------------------------------------------------------------------------


@dataclass
class Usage:
    """Resources of a program.

    Attributes:
        cpu_s: CPU time of running and of ended processes, in seconds.
        memory: memory in bytes; shared memory counts several times.
        tasks: number of processes and threads.
        processes: numbers of the running processes.
    """

    cpu_s: float
    memory: int
    tasks: int
    processes: list[int]


def usage_of(reaper: int) -> Usage:
    """Return the resources of all descendants of a process."""
    rows: dict[int, list[bytes]] = {}
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue  # The process has ended.
        row = rows[int(name)] = text[text.rindex(b")") + 2 :].split()
        children.setdefault(int(row[1]), []).append(int(name))
    ended = sum(map(int, rows[reaper][13:15])) if reaper in rows else 0
    usage = Usage(ended / _CLOCK_TICKS, 0, 0, [])
    waiting = list(children.get(reaper, ()))
    while waiting:
        number = waiting.pop()
        waiting += children.get(number, ())
        row = rows[number]
        usage.processes.append(number)
        usage.cpu_s += sum(map(int, row[11:15])) / _CLOCK_TICKS
        # Tables of pages take 1/512 of the addresses at most.
        tables = int(row[20]) // 512
        usage.memory += int(row[21]) * _PAGE + (_page_tables(number) if tables > 8 * _MIB else 0)
        usage.tasks += int(row[17])
    return usage


def shared_once(processes: list[int]) -> int:
    """Return the memory of processes in bytes; shared memory counts once."""
    total = 0
    for number in processes:
        total += _field(f"/proc/{number}/smaps_rollup", "Pss:") + _page_tables(number)
    return total


def _page_tables(number: int) -> int:
    return _field(f"/proc/{number}/status", "VmPTE:")


def _field(path: str, name: str) -> int:
    """Return a size from a file of the kernel, in bytes."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(name):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # The process has ended.
    return 0


# Supervision --------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Outcome of a program.

    Attributes:
        answer: exit status, limit and seconds; or the description of a fault.
        stdout: standard output.
        stderr: standard error.
    """

    answer: dict[str, Any]
    stdout: bytes
    stderr: bytes


class Supervision:
    """Supervision of one program, from its start to its end.

    Args:
        pipes: pipes of the program.
        reaper: number of the reaper in /proc.
        limits: fields of SandboxLimits.
        stdin: standard input of the program.
        channel: descriptor of the connection to the caller, whose end also ends the program.
    """

    def __init__(self, pipes: Pipes, reaper: int, limits: Mapping[str, float], stdin: bytes, channel: int) -> None:
        self._pipes, self._reaper, self._limits, self._channel = pipes, reaper, limits, channel
        self._stdin = memoryview(stdin)
        self._outputs = {pipes.stdout[0]: bytearray(), pipes.stderr[0]: bytearray()}
        self._largest = int(limits["output_kb"] * 1024)
        self._status = bytearray()
        self._limit: str | None = None
        self._poll = select.poll()
        for descriptor in (pipes.stdin[0], *self._outputs, pipes.status[0]):
            fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK)
        for descriptor in (*self._outputs, pipes.status[0]):
            self._poll.register(descriptor, select.POLLIN)
        self._poll.register(pipes.stdin[0], select.POLLOUT)
        self._poll.register(channel, select.POLLRDHUP)

    def run(self, end_all: Callable[[], None]) -> Outcome | None:
        """Supervise the program to its end.

        Args:
            end_all: function that ends the reaper and all processes of the program, and waits for their end.

        Returns:
            The outcome, or None if the caller has gone.
        """
        start = time.monotonic()
        deadline, next_count = start + self._limits["wall_s"], start + _TICK_S
        ended = gone = False
        while not (ended or gone or self._limit):
            for descriptor, _ in self._poll.poll(_TICK_S * 1000):
                if descriptor == self._channel:
                    gone = True
                elif descriptor == self._pipes.stdin[0]:
                    self._feed()
                elif descriptor == self._pipes.status[0]:
                    ended = self._read_status()
                elif not self._read_output(descriptor):
                    self._poll.unregister(descriptor)
            now = time.monotonic()
            if now >= deadline and not ended:
                self._limit = "wall"
            # Before its report, a reaper may still mount its own /proc: the number would be another process.
            elif now >= next_count and self._status and not ended:
                self._count()
                next_count = time.monotonic() + _TICK_S
        seconds = time.monotonic() - start
        end_all()
        while not self._read_status():
            pass
        for descriptor in self._outputs:
            while self._read_output(descriptor):
                pass
        return None if gone else self._outcome(seconds)

    def _feed(self) -> None:
        try:
            written = os.write(self._pipes.stdin[0], self._stdin[:_CHUNK])
        except BlockingIOError:
            return
        except BrokenPipeError:
            written = len(self._stdin)
        self._stdin = self._stdin[written:]
        if not self._stdin:
            self._poll.unregister(self._pipes.stdin[0])
            os.close(self._pipes.stdin[0])

    def _read_status(self) -> bool:
        """Return True at the end of the reaper."""
        try:
            chunk = os.read(self._pipes.status[0], _CHUNK)
        except BlockingIOError:
            return False
        self._status += chunk
        return not chunk

    def _read_output(self, descriptor: int) -> bool:
        """Return True if there may be more."""
        output = self._outputs[descriptor]
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False
        output += chunk
        if len(output) <= self._largest:
            return bool(chunk)
        del output[self._largest :]
        self._limit = self._limit or "output"
        return False

    def _count(self) -> None:
        usage = usage_of(self._reaper)
        largest = self._limits["memory_mb"] * _MIB
        if usage.cpu_s >= self._limits["cpu_s"]:
            self._limit = "cpu"
        elif usage.tasks > self._limits["processes"]:
            self._limit = "processes"
        elif usage.memory > largest and shared_once(usage.processes) > largest:
            self._limit = "memory"

    def _outcome(self, seconds: float) -> Outcome:
        stdout, stderr = map(bytes, self._outputs.values())
        status = self._status.decode(errors="replace").strip()
        if status.startswith("fault "):
            return Outcome({"fault": status[len("fault ") :].splitlines()[0]}, b"", b"")
        # Without a status, the program ended its reaper, or a limit ended both.
        exit_status = int(status) if status else -signal.SIGKILL
        limit = self._limit or ""
        if not limit and exit_status == -signal.SIGXCPU:
            limit = "cpu"
        elif not limit and exit_status and stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
            limit = "memory"
        return Outcome({"exit_status": exit_status, "limit": limit, "seconds": round(seconds, 4)}, stdout, stderr)


# Program of a sandbox by command ------------------------------------------------------------------------------------


def main() -> None:
    """Run the job on the standard input, and write the answer to the standard output."""
    job, stdin = read_job(0)
    # The program must not write into the answer, so the kernel hides the descriptors of this process.
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        pipes = Pipes.new()
        reaper = os.fork()
        if reaper == 0:
            libc.prctl(CHILD_SUBREAPER, 1, 0, 0, 0)
            os.setsid()
            try:
                become_program(pipes)
            except OSError as error:
                report_fault(pipes, error)
            _execute(job, folder, pipes, libc)
        pipes.close_program_ends()
        outcome = Supervision(pipes, reaper, job["limits"], stdin, 0).run(end_children)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome is not None:
        write_answer(1, outcome.answer, outcome.stdout, outcome.stderr)


def _execute(job: Mapping[str, Any], folder: str, pipes: Pipes, libc: ctypes.CDLL) -> NoReturn:
    try:
        libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
        os.chdir(folder)
        with open(job["file_name"], "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(job["program"])
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "TMPDIR": folder}
        environment.update(LANG="C.UTF-8", PYTHONHASHSEED="0", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        pipes.become_standard()
        visible = _own_tasks() if OWN_PROCESSES in sys.argv else None
        limit_resources(job["limits"], None if visible is None else visible + int(job["limits"]["processes"]))
        command = [*(job["interpreter"] or [sys.executable or "python3"]), job["file_name"]]
        try:
            os.execvpe(command[0], command, environment)
        except OSError as error:
            raise OSError(error.errno, f"{command[0]}: {error.strerror}") from None
    except OSError as error:
        report_fault(pipes, error)


def _own_tasks() -> int:
    """Return the number of processes and threads of this user."""
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid in (os.getuid(), 0):
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass  # The process has ended, or is the supervisor, which hides itself.
    return total


def end_children() -> None:
    """End and collect all processes under this process, apart from programs of another user (sudo)."""
    collected = True
    with suppress(ChildProcessError):
        while collected:
            # The error says that no child is left.
            os.waitpid(-1, os.WNOHANG)
            killed = []
            for number in usage_of(os.getpid()).processes:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(number, signal.SIGKILL)
                    killed.append(number)
            collected = False
            for number in killed:
                # The kernel hands over the children of a collected process. No other process is a child.
                with suppress(ChildProcessError):
                    os.waitpid(number, 0)
                    collected = True


if __name__ == "__main__":
    main()
