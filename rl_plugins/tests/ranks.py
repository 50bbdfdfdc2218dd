"""Processes for tests with several ranks, or with one rank, a process group and DeepSpeed.

The processes are forks of a server. The server has only imported the libraries with long imports: a process must not
fork after a backward pass or an OpenMP loop. The forks stay until the end of the test run and get one function after
the other: process groups and DeepSpeed's backend are made once. After each function the state of the process is
restored, see `rank_state.py`. When a rank fails or hangs, all forks are killed, and the next function gets new forks.
Between two functions the forks are stopped: each process group over gloo has a thread that wakes up 100 times a second.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import pickle
import queue
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rl_plugins.tests.patience import patient

_IMPORTED = [
    "rl_plugins.tests.rank_server",
    "deepspeed", "lightning.pytorch", "rl_plugins.strategies.fsdp", "rl_plugins.strategies.zero",
    "rl_plugins.tests.rank_state", "rl_plugins.tests.rollout.cuda_stubs", "rl_plugins.tests.stages.canned",
]  # fmt: skip
_START_S = 120.0
_BEGUN = b""
"""Message of a rank that begins a function."""
# Time for the other ranks after the failure of a rank: their collectives fail at once.
_AFTER_FAILURE_S = 20.0

_resident: dict[int, _Ranks] = {}
_context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the server of the ranks, without a wait for the imports."""
    # DeepSpeed chooses its accelerator at its import.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _context.set_forkserver_preload(_IMPORTED)
    forkserver.ensure_running()


@cache
def await_server() -> None:
    """Wait for the imports of the server of the ranks."""
    start_server()
    process = _context.Process(target=_nothing)
    process.start()
    process.join()


def _nothing() -> None:
    pass


def run_ranks(
    function: Callable[..., Any], *arguments: Any, world_size: int = 2, timeout_s: float = 600
) -> list[tuple[Any, str]]:
    """Run `function(rank, *arguments)` in `world_size` processes of one thread; return each result and output.

    The ranks have a process group over gloo. RANK, WORLD_SIZE and the group's port on this machine are in the
    environment of each, as nodes of one process.

    Args:
        function: function of a module, called in each rank.
        arguments: further arguments of the function.
        world_size: number of ranks.
        timeout_s: deadline, before `TEST_TIME_SCALE`.

    Raises:
        AssertionError: if a rank failed or did not end before the deadline; with the output of all ranks.
    """
    if world_size not in _resident:
        _resident[world_size] = _Ranks(world_size)
    try:
        return _resident[world_size].run(function, arguments, timeout_s)
    except BaseException:
        _resident.pop(world_size).kill()
        raise


@atexit.register
def _end_resident() -> None:
    for ranks in _resident.values():
        ranks.end()
    _resident.clear()


class _Ranks:
    """The parent's side of some ranks."""

    def __init__(self, world_size: int) -> None:
        start_server()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._logs = [Path(self._folder.name) / f"rank{rank}.log" for rank in range(world_size)]
        self._processes, self._connections = [], []
        for rank, log in enumerate(self._logs):
            mine, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, world_size, theirs, str(log)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)
        # The first rank chooses a port.
        if not self._connections[0].poll(patient(_START_S)):
            raise AssertionError(f"rank 0 did not start within {patient(_START_S):g} s")
        try:
            port = self._connections[0].recv()
        except EOFError:
            raise AssertionError(f"rank 0 did not start:\n{self._logs[0].read_text()}") from None
        for connection in self._connections[1:]:
            connection.send(port)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, but those that have ended."""
        for process in self._processes:
            assert process.pid is not None
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float) -> list[tuple[Any, str]]:
        """See `run_ranks`."""
        call = pickle.dumps((function, arguments))
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send_bytes(call)
        results, failed = self._results(timeout_s)
        late = [rank for rank in range(len(self._logs)) if rank not in results and rank not in failed]
        for rank in late:
            self._dump_stacks(rank)
        printed = [_without_list_of_modules(log.read_text(errors="replace")) for log in self._logs]
        if failed or late:
            first = (failed + late)[0]
            what = "failed" if failed else f"did not end within {patient(timeout_s):g} s"
            others = [rank for rank in range(len(self._logs)) if rank != first]
            outputs = [f"--- rank {rank}\n{printed[rank]}" for rank in [first, *others]]
            raise AssertionError("\n".join([f"rank {first} {what} in {function.__qualname__}:", *outputs]))
        self._signal(signal.SIGSTOP)
        return [(pickle.loads(results[rank]), text) for rank, text in enumerate(printed)]

    def _results(self, timeout_s: float) -> tuple[dict[int, bytes], list[int]]:
        """Return the pickled results of ranks, and the ranks that ended without a result, in their order in time."""
        results: dict[int, bytes] = {}
        failed: list[int] = []
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        # The time of the function counts from the moment when all ranks are in the function.
        not_begun = set(range(len(self._connections)))
        deadline = time.monotonic() + patient(_START_S) + patient(timeout_s)
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    message = connection.recv_bytes()
                except (EOFError, ConnectionResetError):
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + patient(_AFTER_FAILURE_S))
                    continue
                if message != _BEGUN:
                    results[rank] = message
                    continue
                waiting[connection] = rank
                not_begun.discard(rank)
                if not not_begun and not failed:
                    deadline = time.monotonic() + patient(timeout_s)
        return results, failed

    def _dump_stacks(self, rank: int) -> None:
        """End a hanging rank, which writes its stacks at its end."""
        process = self._processes[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGABRT)
        process.join(patient(_AFTER_FAILURE_S))

    def kill(self) -> None:
        """Kill the ranks at once."""
        for process in self._processes:
            process.kill()
        self.end()

    def end(self) -> None:
        """End the ranks after their work, because a rank may still write a file, such as its coverage."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(patient(_AFTER_FAILURE_S))
            process.kill()
            process.join()
        self._folder.cleanup()


def _without_list_of_modules(text: str) -> str:
    """Remove the last part of faulthandler's output, after the stacks: the names of two hundred modules."""
    return re.sub(r"^Extension modules: .*\n", "", text, flags=re.MULTILINE)


def _serve(rank: int, world_size: int, connection: Connection, log: str) -> None:
    """The process of a rank: one function after the other, until the parent closes the connection."""
    import torch
    import transformers

    from rl_plugins.tests.exact_norms import exact_norms
    from rl_plugins.tests.rank_state import RankState
    from rl_plugins.tests.stages import canned

    _print_to(log)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    # Progress bars hold semaphores, and a killed process does not release semaphores.
    transformers.logging.disable_progress_bar()
    # In a process group transformers writes on rank 0 alone, and each rank has another folder.
    canned.other_model()
    _join(rank, world_size, connection)
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    idle = threading.Event()
    idle.set()
    threading.Thread(target=_receive, args=(connection, calls, idle), daemon=True).start()
    state = RankState()
    with exact_norms():
        while (call := calls.get()) is not None:
            _print_to(log)
            try:
                function, arguments = pickle.loads(call)
                connection.send_bytes(_BEGUN)
                result = pickle.dumps(function(rank, *arguments))
                del function, arguments
                state.restore()
            except BaseException:
                traceback.print_exc()
                _flush()
                # The parent and the other ranks take the end of the process for its failure.
                os._exit(1)
            _flush()
            idle.set()
            connection.send_bytes(result)


def _join(rank: int, world_size: int, connection: Connection) -> None:
    """Agree on a port with the other ranks, through the parent, and make the process group."""
    from datetime import timedelta

    from torch.distributed import TCPStore, init_process_group

    address = "127.0.0.1"
    if rank == 0:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        port = store.port
        connection.send(port)
    else:
        port = connection.recv()
        store = TCPStore(address, port, is_master=False)
    os.environ |= {
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size), "RANK": str(rank),
        "NODE_RANK": str(rank), "LOCAL_RANK": "0",
        # DeepSpeed compiles optimizers that no test uses, and would import the compiler.
        "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    timeout = timedelta(seconds=patient(250))
    init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _receive(connection: Connection, calls: queue.SimpleQueue[bytes | None], idle: threading.Event) -> None:
    """Pass calls on; end the process at once when the parent has gone."""
    try:
        while True:
            call = connection.recv_bytes()
            idle.clear()
            calls.put(call)
    except (EOFError, ConnectionResetError):
        if not idle.is_set():
            os._exit(1)
        calls.put(None)


def _print_to(file: str) -> None:
    """Let the output of this process start again, in a file."""
    log = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    # File for the stacks of a rank that hangs or crashes. A trainer of Lightning has put other handlers in place of
    # those of faulthandler, and `enable` alone changes nothing while faulthandler is on.
    faulthandler.disable()
    faulthandler.enable(sys.stderr)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
