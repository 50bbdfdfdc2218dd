"""Processes of `run_ranks`: kept for all functions, restored after each function, with the error of a failed rank."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_plugins.tests.patience import is_running, patient, wait_until
from rl_plugins.tests.ranks import run_ranks


def process_of(rank: int) -> int:
    return os.getpid()


def sum_of_ranks(rank: int) -> float:
    total = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(total)
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} has {total:g}")
    return float(total)


@pytest.mark.parametrize(("world_size", "total"), [(1, 1.0), (2, 3.0)])
def test_run_ranks_returns_results_and_output_of_each_rank(world_size: int, total: float) -> None:
    expected = [(total, f"rank {rank} of {world_size} has {total:g}\n") for rank in range(world_size)]
    assert run_ranks(sum_of_ranks, world_size=world_size) == expected


def test_run_ranks_uses_the_same_processes_again() -> None:
    processes = run_ranks(process_of)
    assert run_ranks(process_of) == processes
    assert len({process for process, _ in processes} | {os.getpid()}) == 3


def state(rank: int) -> dict[str, Any]:
    return {
        "folder": os.getcwd(),
        "variable": os.environ.get("RANKS_TEST"),
        "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),
        "threads": torch.get_num_threads(),
    }


def change_state(rank: int, folder: Path) -> None:
    os.chdir(folder)
    os.environ["RANKS_TEST"] = "changed"
    torch.manual_seed(7 + rank)
    random.seed(7)
    np.random.seed(7)
    torch.set_num_threads(2)


def test_run_ranks_restores_the_state_of_the_processes(tmp_path: Path) -> None:
    before = run_ranks(state)
    run_ranks(change_state, tmp_path)
    assert run_ranks(state) == before


def fail_on_rank_1(rank: int) -> None:
    print(f"rank {rank} begins")
    if rank == 1:
        raise ValueError("rank 1 has failed on purpose")
    torch.distributed.barrier()


def test_run_ranks_raises_with_traceback_and_output_and_starts_new_processes() -> None:
    before = {process for process, _ in run_ranks(process_of)}
    with pytest.raises(AssertionError, match=r"^rank [01] failed in fail_on_rank_1:") as raised:
        run_ranks(fail_on_rank_1)
    for text in ("rank 0 begins", "rank 1 begins", "in fail_on_rank_1", "ValueError: rank 1 has failed on purpose"):
        assert text in str(raised.value)
    assert before.isdisjoint(process for process, _ in run_ranks(process_of))


def hang_on_rank_0(rank: int) -> None:
    if rank == 0:
        threading.Event().wait()


def test_run_ranks_raises_with_the_stack_of_a_rank_that_hangs() -> None:
    message = r"^rank 0 did not end within [0-9.]+ s in hang_on_rank_0:(.|\n)*in hang_on_rank_0"
    with pytest.raises(AssertionError, match=message):
        run_ranks(hang_on_rank_0, timeout_s=1)


KILLED_RUN = """
import os, signal, time
from rl_plugins.tests import ranks
# Other imports of the server take seconds.
ranks._IMPORTED = ["rl_plugins.tests.rank_server"]
def be_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
if __name__ == "__main__":
    ranks.start_server()
    rank = ranks._context.Process(target=be_stopped, daemon=True)
    rank.start()
    while "T" not in open(f"/proc/{rank.pid}/stat").read().split()[2]:
        time.sleep(0.01)
    print(rank.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_a_killed_test_run(tmp_path: Path) -> None:
    script = tmp_path / "killed_run.py"
    script.write_text(KILLED_RUN)
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=patient(100))
    assert ended.returncode == -signal.SIGKILL
    (rank,) = ended.stdout.split()
    wait_until(lambda: not is_running(int(rank)), f"the end of rank {int(rank)} after the end of the test run")
