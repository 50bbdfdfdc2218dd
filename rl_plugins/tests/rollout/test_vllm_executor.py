"""A process of a vLLM engine ends when another process of the engine has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rl_plugins.rollout.vllm import executor as module
from rl_plugins.rollout.vllm.executor import OneForAllExecutor, OneProcessExecutor, ResponseQueues
from rl_plugins.tests.patience import is_running, patient, wait_until

# The import of vLLM takes many seconds, and these modules use only the parts replaced here.
STUBS = """
import sys
from types import SimpleNamespace
class EngineDeadError(Exception): pass
sys.modules["vllm.v1.executor.multiproc_executor"] = SimpleNamespace(MultiprocExecutor=object, WorkerProc=None)
sys.modules["vllm.v1.executor.uniproc_executor"] = SimpleNamespace(UniProcExecutor=object)
sys.modules["vllm.inputs.engine"] = SimpleNamespace(tokens_input=lambda prompt: prompt)
sys.modules["vllm.v1.engine.exceptions"] = SimpleNamespace(EngineDeadError=EngineDeadError)
"""

END_WITH = """
import multiprocessing, signal, threading
from rl_plugins.rollout.vllm.executor import end_with
other = multiprocessing.get_context("fork").Process(target=signal.pause)
other.start()
end_with([process.sentinel for process in multiprocessing.active_children()], unless=lambda: {unless})
(watching,) = [thread for thread in threading.enumerate() if thread.name == "end-with-other-processes"]
assert watching.is_alive()
other.kill()
watching.join()
print("goes on")
"""

STUCK_WORKER = """
import multiprocessing, signal
from rl_plugins.rollout.vllm.executor import end_with

def wait():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        signal.pause()

context = multiprocessing.get_context("fork")
stuck, lost = context.Process(target=wait), context.Process(target=signal.pause)
stuck.start()
lost.start()
print(stuck.pid, flush=True)
end_with([lost.sentinel])
lost.kill()
wait()
"""

KILLED_LATER = """
import multiprocessing, os, signal, time
from rl_plugins.rollout.vllm.executor import end_with
other = multiprocessing.get_context("fork").Process(target=signal.pause)
other.start()
end_with([process.sentinel for process in multiprocessing.active_children()], after_s=60)
other.kill()
other.join()
time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""

DEAD_ENGINE = """
import asyncio
from rl_plugins.rollout.vllm.engine_loop import EngineLoop
from rl_plugins.rollout.vllm.requests import EngineRequest

class Engine:
    renderer = None
    def add_request(self, name, *arguments, **options): return name
    def abort_request(self, names, internal): pass
    def step(self): raise EngineDeadError

async def sample():
    loop = EngineLoop(SimpleNamespace(llm_engine=Engine()))
    loop.start({"one": EngineRequest([1], None)})
    await loop.wait(["one"], ["one"], 1)

asyncio.run(sample())
print("goes on")
"""


def test_processes_of_engines_meet_through_a_file_of_the_engine_and_take_no_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of a machine start at the same time, and could choose the same port."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    for device in ("cpu", "cuda:0"):
        executor: Any = object.__new__(OneProcessExecutor)
        executor.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device=device))
        method, rank, _ = executor._distributed_args()
        assert method.startswith(f"file://{tmp_path}/") and rank == 0
    assert not gettempdir().startswith(str(tmp_path))


def run_script(script: str) -> SimpleNamespace:
    """Return exit code and outputs of a script's process; the process must not end with an error of its own."""
    ended = subprocess.run(
        [sys.executable, "-c", STUBS + script], capture_output=True, text=True, timeout=patient(60), check=False
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return SimpleNamespace(code=ended.returncode, output=ended.stdout, error=ended.stderr)


@pytest.mark.parametrize(("unless", "code", "output"), [(False, 1, ""), (True, 0, "goes on\n")])
def test_end_with_ends_the_process_after_another_has_ended_unless_told_to_stay(
    unless: bool, code: int, output: str
) -> None:
    ended = run_script(END_WITH.format(unless=unless))
    assert (ended.code, ended.output) == (code, output)


def test_end_with_kills_the_other_workers_of_a_lost_worker() -> None:
    ended = run_script(STUCK_WORKER)
    assert ended.code == 1
    wait_until(lambda: not is_running(int(ended.output)), "the end of the other worker")


def test_end_with_leaves_time_for_an_end_by_the_parent_of_all_processes() -> None:
    """Ray reports an actor that ends before Ray kills the actor."""
    ended = run_script(KILLED_LATER)
    assert ended.code == -signal.SIGKILL and not ended.error


def test_engine_loop_ends_the_process_if_the_engine_is_dead() -> None:
    ended = run_script(DEAD_ENGINE)
    assert (ended.code, ended.output) == (1, "")


class Responses(deque[tuple[Any, str]]):
    def dequeue(self, timeout: float | None = None) -> tuple[Any, str]:
        return self.popleft()


@dataclass
class Workers:
    """Workers that answer each call, some with an error."""

    queues: list[Responses]
    failing: set[tuple[str, int]]

    def enqueue(self, call: tuple[str, Any, Any, int | None]) -> None:
        statuses = WorkerProc.ResponseStatus
        method, _, _, rank = call
        for number, queue in enumerate(self.queues):
            if rank in (None, number):
                status = statuses.FAILURE if (method, number) in self.failing else statuses.SUCCESS
                queue.append((status, f"{method} of {number}"))


def test_collective_rpc_after_a_failed_call_returns_no_late_responses() -> None:
    queues = [Responses() for _ in range(3)]
    executor: Any = OneForAllExecutor.__new__(OneForAllExecutor)
    executor.rpc_broadcast_mq = Workers(queues, {("load", 0), ("load", 1), ("check", 1)})
    executor.is_failed, executor.futures_queue, executor.response_mqs = False, deque(), ResponseQueues(queues)
    for method, failed in (("load", "load of 0"), ("check", "check of 1")):
        with pytest.raises(RuntimeError, match=f"Worker failed with error '{failed}'"):
            executor.collective_rpc(method)
        assert executor.collective_rpc("start") == ["start of 0", "start of 1", "start of 2"]
        assert executor.collective_rpc("sample", unique_reply_rank=2) == "sample of 2"


PARENT = """
import multiprocessing, os, signal
from rl_plugins.rollout.vllm.executor import end_with_parent

def wait(ready):
    end_with_parent()
    ready.set()
    signal.pause()

context = multiprocessing.get_context("fork")
ready = context.Event()
child = context.Process(target=wait, args=(ready,))
child.start()
ready.wait()
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_end_with_parent_ends_the_process_of_an_engine_core_with_a_killed_actor() -> None:
    ended = run_script(PARENT)
    assert ended.code == -signal.SIGKILL
    child = int(ended.output)
    wait_until(lambda: not is_running(child), "the end of the child", 30)


@pytest.mark.parametrize(
    ("executor", "base"), [(OneProcessExecutor, UniProcExecutor), (OneForAllExecutor, MultiprocExecutor)]
)
def test_executors_end_with_the_actor_before_models_load(
    monkeypatch: pytest.MonkeyPatch, executor: Any, base: Any
) -> None:
    calls: list[str] = []
    own = executor.__new__(executor)
    own.response_mqs = []
    monkeypatch.setattr(module, "end_with_parent", lambda: calls.append("end with parent"))
    monkeypatch.setattr(base, "_init_executor", lambda self: calls.append("load"))
    own._init_executor()
    assert calls == ["end with parent", "load"]
