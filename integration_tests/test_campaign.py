"""A run that loses a process of any kind ends with the same bits as a run left alone.

Other modules kill the other kinds of processes: `test_resume`, `test_lost_critic`, `test_many_machines` and
`test_tracking_outage`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from integration_tests import campaign
from integration_tests.campaign import (
    MARK,
    Campaign,
    Kind,
    Moment,
    Outcome,
    differences,
    left_behind,
    read_results,
    tables,
    write_page,
)
from integration_tests.conftest import Recipe
from rl_plugins.run_folder import append_metrics

LOST = Outcome("engine", 0, Moment(3, 0.5), [0], True, 8.2, 20.0)
BAD = Outcome("engine", 1, Moment(0, 0.1), [69, 0], True, 30.0, 4.0, ["train/loss"], ["process ray::IDLE"])


@pytest.mark.extended
def test_run_that_loses_an_environment_worker_ends_with_the_same_bits(tmp_path: Path) -> None:
    # Without vLLM, the pool of the critic and a second worker, a run starts in a third of the time.
    options = (
        "rollout.engine=transformers", "placement.num_workers=1", "placement.critic.actors=0", "sampling.stop=[]",
        "sampling.max_tokens=6",
    )  # fmt: skip
    outcome = Campaign(tmp_path, options=options).run("environment worker", 0, Moment(2, 0))
    assert outcome.killed and outcome.statuses == [0] and outcome.differences == []


def test_read_results_goes_on_after_a_torn_line_and_write_page_keeps_the_text_around_the_table(tmp_path: Path) -> None:
    lines = [json.dumps(asdict(outcome)) for outcome in (LOST, BAD)]
    (tmp_path / "results.jsonl").write_text("\n".join([lines[0], lines[1][:40], lines[1]]))
    assert read_results(tmp_path) == [LOST, BAD] and LOST.good and not BAD.good
    assert not replace(LOST, killed=False).good
    assert read_results(tmp_path / "none") == []
    row, asked = "| engine | 2 | 1 | 1 | 1 | 19, 30 |", "| SIGINT | 2 | 2 | 2 | 1 | 20, 20 |"
    stopped = replace(LOST, kind="SIGINT", statuses=[130, 0])
    lines = tables([LOST, BAD, stopped, replace(stopped, faults=["Traceback"])]).splitlines()
    assert lines[2] == row and lines[-1] == asked and len(lines) == 7
    page = tmp_path / "kills.md"
    page.write_text("before\n<!-- kills -->\nold\n<!-- end kills -->\nafter\n")
    write_page([LOST, BAD], page)
    text = page.read_text()
    assert text.startswith("before\n<!-- kills -->\n| killed") and text.endswith("<!-- end kills -->\nafter\n")
    assert row in text and "old" not in text


class ScriptedProcess:
    """A command in place of a process: each question for the status does the next action."""

    pid = 0

    def __init__(self, actions: list[Callable[[], None]], status: int, clock: list[float]) -> None:
        self._actions, self._status, self._clock = actions, status, clock

    def poll(self) -> int | None:
        if not self._actions:
            return self._status
        self._actions.pop(0)()
        self._clock[0] += 1
        return None

    def wait(self, timeout: float) -> int:
        while self.poll() is None:
            pass
        return self._status


def nothing() -> None:
    """Let a scripted process go on."""


@pytest.mark.parametrize("checkpoint", [True, False])
def test_seconds_to_the_next_step_leave_out_rows_of_the_start_that_failed(
    checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clock, workers = tmp_path / "outputs" / "run", [0.0], list[object]()
    folder.mkdir(parents=True)
    if checkpoint:
        (folder / "checkpoint_00000003").mkdir()
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _: None))
    monkeypatch.setattr(Recipe, "processes", lambda run, name="": workers)
    monkeypatch.setitem(campaign.KINDS, "driver", Kind((), lambda run: [SimpleNamespace(send_signal=print)]))

    def row() -> None:
        append_metrics(folder / "metrics.jsonl", {"train/loss": 0.1}, 4)

    def begin() -> None:
        if checkpoint:
            (folder / "resumes.txt").write_text("run: resumed from checkpoint_00000003\n")
        else:
            workers.append("worker")

    # The kill waits twice for a process. The first start writes a row and fails. A worker of the first start writes
    # another row beside the second start.
    starts = [([nothing, nothing, row], 1), ([row, begin, row], 0)]
    (tmp_path / "log").touch()

    def start() -> Recipe:
        process: Any = ScriptedProcess(*starts.pop(0), clock)
        return Recipe(tmp_path, process, tmp_path / "log", "run")

    outcome = campaign._run_with_kill(start, "driver", 0, Moment(0, 0), None)
    assert outcome.statuses == [1, 0] and outcome.killed
    assert (outcome.end_s, outcome.restart_s) == (1, 4)


def test_tracking_server_is_killed_after_a_run_has_connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, connected = [0.0], tmp_path / "outputs" / "run" / "mlflow_run_id"
    connected.parent.mkdir(parents=True)
    (tmp_path / "log").touch()
    actions: list[Callable[[], None]] = [nothing, connected.touch, nothing]

    def kill() -> None:
        assert connected.is_file()

    server: Any = SimpleNamespace(uri="http://127.0.0.1:5000", kill=kill, start=nothing)
    process: Any = ScriptedProcess(actions, 0, clock)
    run = Recipe(tmp_path, process, tmp_path / "log", "run")
    outcome = campaign._run_with_kill(lambda *_: run, campaign.TRACKING_SERVER, 0, Moment(0, 0), server)
    assert outcome.killed and outcome.statuses == [0]


def test_kill_without_a_process_is_repeated_at_another_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[Moment] = []

    def missed(start: object, kind: str, number: int, moment: Moment, server: object) -> Outcome:
        moments.append(moment)
        return Outcome(kind, number, moment, [0], False, 0.0, 9.0)

    monkeypatch.setattr(Campaign, "_left_alone", lambda self, recipe: tmp_path)
    for name, result in (("_run_with_kill", missed), ("differences", lambda *_: []), ("left_behind", lambda *_: [])):
        monkeypatch.setattr(campaign, name, result)
    for folder in (tmp_path, tmp_path, tmp_path / "again"):
        (folder / "workplace" / "tiny").mkdir(parents=True, exist_ok=True)
        Campaign(folder).run("engine", 3)
    first, repeated, reproduced = moments
    assert first == reproduced != repeated


def test_differences_names_metrics_and_files_that_differ(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, run):
        (folder / "policy").mkdir(parents=True)
        (folder / "policy" / "model.safetensors").write_bytes(b"weights")
        for step in (1, 2):
            append_metrics(folder / "metrics.jsonl", {"train/loss": 0.1 * step, "val/time/rollout": step}, step)
    assert differences(run, whole) == []
    append_metrics(run / "metrics.jsonl", {"train/loss": 0.3, "val/time/rollout": 9}, 2)
    (run / "policy" / "model.safetensors").write_bytes(b"other")
    assert differences(run, whole) == ["train/loss", "policy/model.safetensors"]


def test_left_behind_finds_and_ends_processes_shared_memory_and_temporary_files(tmp_path: Path) -> None:
    before, mark = set(os.listdir("/dev/shm")), f"mine-{os.getpid()}"
    memory = Path("/dev/shm") / f"left-{os.getpid()}"
    sessions = tmp_path / f"ray-{os.geteuid()}" / "ray" / "session_1"
    sessions.mkdir(parents=True)
    (sessions / "log").touch()
    try:
        memory.touch()
        assert left_behind("other", tmp_path, before | {memory.name}, patience_s=0.1) == []
        (tmp_path / "pymp-1").mkdir()
        program = "print(flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, MARK: mark},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None and process.stdout.readline()
            left = left_behind(mark, tmp_path, before, patience_s=0.1)
            assert process.wait() == -9
    finally:
        memory.unlink()
    assert [entry for entry in left if "left-" in entry or "pymp" in entry] == [str(memory), "pymp-1"]
    assert left[0].startswith("process ") and program in left[0]
