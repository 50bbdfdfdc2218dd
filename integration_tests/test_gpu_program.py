"""The program for GPUs without vLLM, on CPU with tiny sizes: cases, processes and table."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from integration_tests.gpu.without_vllm import __main__ as command
from integration_tests.gpu.without_vllm.cases import Case, Place, Skipped, run_case
from integration_tests.gpu.without_vllm.program import SECTIONS, Section, run_section
from integration_tests.gpu.without_vllm.results import FAILED, PASSED, SKIPPED, Result, read
from integration_tests.gpu.without_vllm.section_process import cases_of
from rl_plugins.tests.patience import patient
from rl_plugins.tests.ranks import run_ranks

# Cases of the slow sections; of the other sections, all cases.
SOME = {
    "single_device": ["32-true"],
    "zero1": ["bf16-mixed"],
    "zero2": ["lora 32-true"],
    "zero3": ["lora bf16-mixed"],
    "fsdp": ["bf16-mixed"],
}
NEEDS_GPU = {
    ("environment", "faults"),
    ("packed_attention", "kernel bfloat16"),
    ("liger", "blocks"),
    ("liger", "output head"),
}


def three_cases(place: Place) -> Iterable[Case]:
    """Cases with each status."""

    def fail() -> dict[str, float]:
        raise ValueError("the number is wrong")

    def skip() -> dict[str, float]:
        raise Skipped("no part")

    return [Case("good", lambda: {"number": 1.23456}), Case("absent", skip), Case("bad", fail)]


def endless_case(place: Place) -> Iterable[Case]:
    """Return a case with an end, and a case without an end."""

    def sleep() -> dict[str, float]:
        time.sleep(1000)
        return {}

    return [Case("short", dict), Case("endless", sleep)]


def ending_case(place: Place) -> Iterable[Case]:
    """Return a case that ends its process."""

    def end() -> dict[str, float]:
        print("last words", flush=True)
        os._exit(3)

    return [Case("ending", end)]


def section_of(function: object, deadline_s: float = 60) -> Section:
    """The section of a function of this module."""
    return Section(f"{__name__}.{function.__name__}", deadline_s)  # type: ignore[attr-defined]


def run_on_cpu(rank: int) -> list[Result]:
    """Run cases of all sections in this process."""
    results = []
    for name, section in SECTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            for case in cases_of(section.function)(Place("cpu", Path(folder))):
                if case.name in SOME.get(name, [case.name]):
                    results.append(run_case(name, case))
    return results


class ReceiverThread(threading.Thread):
    """The other process of the section `cuda_ipc`, as a thread on the same pretended GPU."""

    def __init__(self, target: Callable[..., None], args: tuple[Connection, Place], daemon: bool) -> None:
        super().__init__(daemon=daemon)
        pipe, place = args
        # A process has a copy of its end of the pipe.
        self.receive = partial(target, Connection(os.dup(pipe.fileno())), place)

    def run(self) -> None:
        from rl_plugins.tests.rollout.cuda_stubs import on_gpu

        with on_gpu("GPU-0"):
            self.receive()

    def kill(self) -> None:
        """Nothing: the thread has ended, or ends with the process."""


def send_on_pretended_gpu(rank: int) -> list[Result]:
    """Run the cases of `cuda_ipc` with little memory of the CPU as that of a GPU."""
    from integration_tests.gpu.without_vllm import cuda_ipc
    from rl_plugins.tests.rollout.cuda_stubs import cuda_on_cpu, on_gpu

    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=ReceiverThread)
    small = {"EMBEDDING": 50_000, "LAYER": 3_000, "LAYERS": 40, "_MIB": 400}
    with cuda_on_cpu(), on_gpu("GPU-0"), ExitStack() as patches:
        patches.enter_context(patch.object(cuda_ipc.multiprocessing, "get_context", lambda method: context))
        for name, value in small.items():
            patches.enter_context(patch.object(cuda_ipc, name, value))
        return [run_case("cuda_ipc", case) for case in cuda_ipc.cases(Place("cuda", Path()))]


def test_weights_go_through_cuda_ipc_of_a_pretended_gpu() -> None:
    [(results, _)] = run_ranks(send_on_pretended_gpu, world_size=1)
    assert not [result.message for result in results if result.status != PASSED]
    assert "exceeds buffer_size_bytes" in results[0].figures["message"]
    assert len(results) == 4 and all(result.figures["gb_per_s"] > 0 for result in results[1:])


def call_kernel_of_torch_2_11(rank: int) -> tuple[Any, ...]:
    """Return what the kernel of torch 2.11 gets from the call of `packed_sdpa`."""
    from integration_tests.gpu.without_vllm import kernel
    from rl_plugins.models import packed_attention

    def old_kernel(query: str, *, window_size: tuple[int, int]) -> tuple[Any, ...]:
        return query, window_size

    with (
        patch.object(packed_attention, "varlen_attn", packed_attention.varlen_attn),
        patch.object(kernel, "varlen_attn", old_kernel),
    ):
        kernel.use_kernel_of_this_torch()
        call: Any = packed_attention.varlen_attn
        return kernel.takes_enable_gqa(), call("query", window_size=(-1, 0), enable_gqa=True)


def test_kernel_of_torch_2_11_is_called_without_enable_gqa() -> None:
    [(found, _)] = run_ranks(call_kernel_of_torch_2_11, world_size=1)
    assert found == (False, ("query", (-1, 0)))


def test_cases_of_all_sections_run_on_cpu() -> None:
    [(results, _)] = run_ranks(run_on_cpu, world_size=1, timeout_s=540)
    assert {result.section for result in results} == set(SECTIONS)
    assert {name: [r.case for r in results if r.section == name] for name in SOME} == SOME
    assert not [result.message for result in results if result.status == FAILED]
    skipped = {(result.section, result.case) for result in results if result.status == SKIPPED}
    assert {place for place in skipped if place[0] != "cuda_ipc"} == NEEDS_GPU
    assert {result.status for result in results if result.section == "cuda_ipc"} == {SKIPPED}
    trainings = [result for result in results if result.section in SOME]
    assert all(result.figures["gap"] < 0.3 for result in trainings)


def test_sections_import_neither_ray_nor_vllm_nor_pytest() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['ray', 'vllm', 'pytest'])); "
        "from integration_tests.gpu.without_vllm.program import SECTIONS; "
        "from integration_tests.gpu.without_vllm.section_process import cases_of; "
        "from rl_plugins.strategies import fsdp, single_device, zero; "
        "print(*[cases_of(section.function).__name__ for section in SECTIONS.values()])"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert outcome.returncode == 0, outcome.stderr
    assert len(outcome.stdout.split()) == len(SECTIONS)


def test_run_section_keeps_the_results_of_failed_and_endless_processes(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results = run_section("first", section_of(three_cases), "cpu", file)
    assert [(r.case, r.status) for r in results] == [("good", PASSED), ("absent", SKIPPED), ("bad", FAILED)]
    assert results[0].figures == {"number": 1.23456}
    assert "in fail" in results[2].message and results[2].row().endswith("ValueError: the number is wrong")
    ended = run_section("second", section_of(ending_case), "cpu", file)
    assert [(r.case, r.status) for r in ended] == [("process", FAILED)]
    assert "last words" in ended[0].message and ended[0].row().endswith("the process ended with status 3")
    endless = run_section("third", section_of(endless_case, patient(10)), "cpu", file)
    assert [r.case for r in endless] == ["short", "process"]
    assert endless[1].row().endswith(f"the process did not end within {patient(10):g} s")
    assert read(file) == [*results, *ended, *endless]


def test_program_prints_a_table_and_exits_with_1_if_a_case_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "results.jsonl"
    monkeypatch.setitem(SECTIONS, "own", section_of(three_cases))
    monkeypatch.setattr(sys, "argv", ["program", "--device", "cpu", "--sections", "own", "--output", str(file)])
    assert command.main() == 1
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[:3]] == [
        ["own", "good", "passed"], ["own", "absent", "skipped"], ["own", "bad", "FAILED"]
    ]  # fmt: skip
    assert rows[0].endswith("number 1.235") and rows[3] == f"1 passed, 1 skipped, 1 FAILED; results: {file}"
    assert len(read(file)) == 3


def test_program_without_a_gpu_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.jsonl"
    monkeypatch.setattr(command, "_has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["program", "--output", str(file)])
    assert command.main() == 2
    assert "torch shows no CUDA device" in capsys.readouterr().out
    assert not file.exists()
