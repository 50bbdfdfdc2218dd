"""The benchmark of an update: a training on CPU, processes that fail or hang, rows, and the end without a GPU."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from benchmarks.gpu import update, update_process
from benchmarks.gpu.update import Measured, Task
from benchmarks.gpu.update_process import covered, train
from rl_plugins.launch.gpus import GpuMachine
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.patience import patient
from rl_plugins.tests.ranks import run_ranks

MEASURED = Measured(2.0, 4, 12345.6, 0.41, 3.0, 0.2)


def task_of(policy: Path, strategy: str = "single_device", **changes: Any) -> Task:
    """The task of two steps in two micro-batches each."""
    save_tiny_policy(policy, hidden_size=32, intermediate_size=48)
    return replace(Task(strategy, str(policy), "cpu", 4, 2, 8, 180, steps=2), **changes)


def train_as_rank(rank: int, task: Task) -> Measured:
    """Train in this process."""
    return train(task, lambda words: None)


def test_train_measures_updates_and_writes_tables_of_operators_and_functions(tmp_path: Path) -> None:
    told: list[str] = []
    found = train(task_of(tmp_path / "policy", tables=f"{tmp_path}/0.5b_single_device"), told.append)
    assert found.seconds > 0 and found.peak_gib > 0 and math.isnan(found.mfu) and math.isnan(found.busy)
    # Two samples of 8 tokens share a prompt of 64 tokens.
    assert found.micro_batches == 2
    assert found.tokens_per_s * found.seconds == pytest.approx(4 * (64 + 2 * 8))
    assert told[1:-1] == [f"the update of step {step} of 4" for step in range(1, 5)]
    operators = (tmp_path / "0.5b_single_device_cpu_time.txt").read_text()
    assert "aten::mm" in operators and "Self CPU" in operators
    functions = (tmp_path / "0.5b_single_device_functions.txt").read_text()
    assert "Ordered by: internal time" in functions and "Ordered by: cumulative time" in functions
    # The hooks of a backward pass are among the functions.
    assert "_policy_losses" in functions and "packed_attention.py" in functions


@pytest.mark.parametrize("strategy", ["zero3", "fsdp"])
def test_train_measures_updates_of_a_sharded_policy(strategy: str, tmp_path: Path) -> None:
    [(found, _)] = run_ranks(train_as_rank, task_of(tmp_path / "policy", strategy), world_size=1)
    assert found.seconds > 0 and found.micro_batches == 2


def test_busy_share_counts_operations_of_the_gpu_and_no_annotations(monkeypatch: pytest.MonkeyPatch) -> None:
    def event(device: DeviceType, start: float, end: float, *, annotation: bool = False) -> SimpleNamespace:
        return SimpleNamespace(
            device_type=device, time_range=SimpleNamespace(start=start, end=end), is_user_annotation=annotation
        )

    events = [
        event(DeviceType.CUDA, 0, 500_000), event(DeviceType.CUDA, 3_000_000, 3_500_000),
        event(DeviceType.CUDA, 0, 4_000_000, annotation=True), event(DeviceType.CPU, 0, 4_000_000),
    ]  # fmt: skip
    clock = iter([10.0, 14.0])
    monkeypatch.setattr(
        update_process, "profile", lambda activities: nullcontext(SimpleNamespace(events=lambda: events))
    )
    monkeypatch.setattr(update_process.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(update_process.time, "perf_counter", lambda: next(clock))
    share = [math.nan]
    with update_process.busy_share(share):
        pass
    monkeypatch.undo()
    assert share == [0.25]


def test_covered_is_the_length_of_the_union_of_spans() -> None:
    assert covered([]) == 0
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 1.5), (1.0, 3.0)]) == 4


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (f"write('result.json', {json.dumps(asdict(MEASURED))!r})", MEASURED),
        ("write('error', 'OutOfMemoryError: no memory'); sys.exit(1)", "OutOfMemoryError: no memory"),
        ("sys.exit(3)", "the process ended with status 3"),
        (
            "write('progress', 'the update of step 2 of 3'); time.sleep(1000)",
            "no end within {} s, in the update of step 2 of 3",
        ),
    ],
)
def test_run_task_returns_figures_error_or_place_of_a_hang(
    code: str, found: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = (
        "import pathlib, sys, time; write = lambda name, text: (pathlib.Path(sys.argv[1]) / name).write_text(text); "
    )
    monkeypatch.setattr(update, "PROCESS", (sys.executable, "-S", "-c", start + code))
    deadline_s = patient(4 if "1000" in code else 60)
    task = Task("zero3", "policy", "cpu", 4, 2, 8, 180, steps=2)
    expected = found.format(f"{deadline_s:g}") if isinstance(found, str) else found
    assert update.run_task(task, tmp_path, deadline_s) == expected
    assert Task(**json.loads((tmp_path / update.TASK).read_text())) == task


def test_row_has_the_seconds_of_a_micro_batch_and_shares_if_known() -> None:
    assert update.row("zero3", MEASURED).split() == [
        "zero3", "2.000", "4", "0.5000", "12,346", "41.0%", "3.00", "20.0%"
    ]  # fmt: skip
    assert update.row("zero3", replace(MEASURED, mfu=math.nan, busy=math.nan)).split()[5::2] == ["-", "-"]
    assert len(update.row("zero3", MEASURED)) == len(update.head())


def test_benchmark_goes_on_after_a_failed_strategy_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks: list[Task] = []

    def run_task(task: Task, folder: Path, deadline_s: float) -> Measured | str:
        assert Path(task.policy, "config.json").is_file() and folder.is_dir()
        tasks.append(task)
        return "ValueError: no" if task.strategy == "zero1" else MEASURED

    monkeypatch.setattr(update, "run_task", run_task)
    options = ["--device", "cpu", "--strategies", "zero1", "fsdp", "--prompts", "6", "--profile", str(tmp_path / "new")]
    monkeypatch.setattr(sys, "argv", ["update", *options])
    assert update.main() == 1
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("tiny: 0.4 M parameters, 6 x 2 samples")
    assert rows[2] == f"  {'zero1':15}  failed: ValueError: no" and rows[3] == update.row("fsdp", MEASURED)
    assert [(task.prompts, task.steps, task.tables) for task in tasks] == [
        (6, 3, f"{tmp_path}/new/0.5b_{strategy}") for strategy in ("zero1", "fsdp")
    ]


def test_benchmark_without_a_gpu_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        update, "read_machine", lambda: GpuMachine((), "", (13, 0), "2.13.0", (13, 0), 2**34, 2**40, {})
    )
    monkeypatch.setattr(sys, "argv", ["update"])
    assert update.main() == 2
    assert capsys.readouterr().out.startswith("CUDA shows no GPU")
