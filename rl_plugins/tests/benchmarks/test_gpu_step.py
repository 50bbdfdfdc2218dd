"""The report of the benchmark on GPUs, from the metrics of handmade runs, and its end without a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import step
from benchmarks.runs import MeasuredRun
from rl_plugins.launch.gpus import Gpu, GpuMachine

MACHINE = GpuMachine((), "", (13, 0), "2.13.0", (13, 0), 2**34, 2**40, {})


def run(offload: float, reload: float) -> MeasuredRun:
    row = {
        "time/step": 6.0 + offload + reload, "time/rollout": 4.0, "time/update_policy": 2.0, "time/offload": offload,
        "time/reload": reload, "time/update_weights": 0.5, "throughput/mfu": 0.41, "samples_per_s": 64.0 - offload,
    }  # fmt: skip
    # Medians leave out the first two steps.
    return MeasuredRun([dict.fromkeys(row, 9.0)] * 2 + [row] * 3)


MEASURED = step.Measured("0.5b: work", {"while_sampling": run(1.0, 0.7), "stay": run(0.25, 0.125)}, 10**9, 8e9, 30.0)


def test_report_gives_phases_mfu_and_the_seconds_of_wake_up_and_sleep() -> None:
    lines = step.report(MEASURED)
    figures = {line.split()[0]: line.split()[-2:] for line in lines[2:7]}
    assert figures["step"] == ["7.700", "6.375"] and figures["offload"] == ["1.000", "0.250"]
    assert [line.split()[0] for line in lines[2:5]] == ["step", "rollout", "update_policy"]
    assert any(line.split() == ["MFU", "of", "the", "update", "41.0%", "41.0%"] for line in lines)
    text = "\n".join(lines)
    assert "wake up in 0.250 s and go to sleep in 0.125 s; the trainer's memory moves in 1.325 s" in text
    assert "weight update 2.0 GB/s: 0.25 of a copy in the memory of a GPU, 8 GB/s" in text


def test_report_compares_the_second_run_with_trl_or_says_why_not() -> None:
    assert step.report(MEASURED)[-1] == "  samples/s 63.8; TRL with colocated vLLM 30.0: 2.12 times its rate"
    # A faster first run does not count.
    faster = replace(MEASURED, runs={**MEASURED.runs, "while_sampling": run(0.0, 0.0)})
    assert step.report(faster)[-1] == step.report(MEASURED)[-1]
    assert step.report(replace(MEASURED, trl="TRL failed: no"))[-1] == "  samples/s 63.8; TRL failed: no"


def test_run_trl_returns_the_last_line_of_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def fail(module: list[str], work: list[str]) -> None:
        commands.append([*module, *work])
        raise RuntimeError("it ended with status 1:\nValueError: vLLM is too new\n")

    monkeypatch.setattr(step, "run_alternative", fail)
    assert step.run_trl(tmp_path, 4, 256, 8) == "TRL failed: ValueError: vLLM is too new"
    assert commands[0][:3] == ["accelerate.commands.launch", "--num_processes", "4"]
    monkeypatch.setattr(step, "run_alternative", lambda module, work: {"samples_per_s": 12})
    assert step.run_trl(tmp_path, 4, 256, 8) == 12.0


def test_report_of_a_gpu_with_an_unknown_peak_has_no_mfu() -> None:
    rows = [{name: value for name, value in row.items() if name != "throughput/mfu"} for row in run(1.0, 0.7).steps]
    lines = step.report(replace(MEASURED, runs=dict.fromkeys(step.PLACES, MeasuredRun(rows))))
    assert any(line.split()[-2:] == ["nan%", "nan%"] for line in lines)


def test_benchmark_without_a_gpu_or_cuda_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["step"])
    gpu = Gpu(0, "GPU-0", "NVIDIA H200", 143_771, 143_000, "580.65", False)
    without_cuda = replace(MACHINE, gpus=(gpu,), torch="2.13.0+cpu", torch_cuda=None)
    for machine, words in ((MACHINE, "CUDA shows no GPU"), (without_cuda, "torch 2.13.0+cpu is built for CPUs")):
        monkeypatch.setattr(step, "read_machine", lambda machine=machine: machine)
        assert step.main() == 2
        assert capsys.readouterr().out.startswith(words)
