"""The program for GPUs without vLLM: processes and table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from integration_tests.gpu.without_vllm import __main__ as command
from integration_tests.gpu.without_vllm.cases import Case, Place, Skipped
from integration_tests.gpu.without_vllm.program import SECTIONS, Section, run_section
from integration_tests.gpu.without_vllm.results import FAILED, PASSED, SKIPPED, read
from rl_plugins.tests.patience import patient


def three_cases(place: Place) -> Iterable[Case]:
    """Cases with each status."""

    def fail() -> dict[str, float]:
        raise ValueError("the number is wrong")

    def skip() -> dict[str, float]:
        raise Skipped("no part")

    return [Case("good", lambda: {"number": 1.23456}), Case("absent", skip), Case("bad", fail)]


def endless_case(place: Place) -> Iterable[Case]:
    """Return a case without an end."""

    def sleep() -> dict[str, float]:
        time.sleep(1000)
        return {}

    return [Case("endless", sleep)]


def ending_case(place: Place) -> Iterable[Case]:
    """Return a case with an end, and a case that ends its process."""

    def end() -> dict[str, float]:
        print("last words", flush=True)
        os._exit(3)

    return [Case("short", dict), Case("ending", end)]


def section_of(function: object, deadline_s: float = 60) -> Section:
    """The section of a function of this module."""
    return Section(f"{__name__}.{function.__name__}", deadline_s)  # type: ignore[attr-defined]


@pytest.mark.extended
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


@pytest.mark.extended
def test_run_section_keeps_the_results_of_failed_and_endless_processes(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    results = run_section("first", section_of(three_cases), "cpu", file)
    assert [(r.case, r.status) for r in results] == [("good", PASSED), ("absent", SKIPPED), ("bad", FAILED)]
    assert results[0].figures == {"number": 1.23456}
    assert "in fail" in results[2].message and results[2].row().endswith("ValueError: the number is wrong")
    ended = run_section("second", section_of(ending_case), "cpu", file)
    assert [(r.case, r.status) for r in ended] == [("short", PASSED), ("process", FAILED)]
    assert "last words" in ended[1].message and ended[1].row().endswith("the process ended with status 3")
    endless = run_section("third", section_of(endless_case, patient(10)), "cpu", file)
    assert [r.case for r in endless] == ["process"]
    assert endless[0].row().endswith(f"the process did not end within {patient(10):g} s")
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


@pytest.mark.extended
def test_section_of_sequence_parallelism_starts_a_second_rank(tmp_path: Path) -> None:
    section = replace(SECTIONS["sequence_parallel"], deadline_s=patient(120))
    results = run_section("sequence_parallel", section, "cpu", tmp_path / "results.jsonl")
    assert not [result.message for result in results if result.status != PASSED]
    assert [result.case.split()[0] for result in results] == ["1", "1", "1", "2", "2", "2"]
