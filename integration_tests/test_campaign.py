"""A run that loses a process of any kind ends with the same bits as a run left alone.

Other modules kill the driver, training workers, reward workers, engines and one of their processes (`test_resume`), the
actor of a critic (`test_lost_critic`) and of a teacher (`test_many_machines`), and the tracking server
(`test_tracking_outage`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from integration_tests.campaign import (
    KINDS,
    MARK,
    Campaign,
    Moment,
    Outcome,
    differences,
    left_behind,
    read_results,
    table,
    write_page,
)
from rl_plugins.run_folder import append_metrics

LOST = Outcome("engine", 0, Moment(3, 0.5), [0], 8.2)
BAD = Outcome("engine", 1, Moment(0, 0.1), [69, 0], 30.0, ["train/loss"], ["process ray::IDLE"])


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"))


# Without vLLM, a pool and a second worker, a run starts in a third of the time.
ONE_WORKER = (
    "rollout.engine=transformers", "placement.num_workers=1", "placement.reference.actors=0",
    "placement.critic.actors=0", "sampling.stop=[]", "sampling.max_tokens=6",
)  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("whole-run", ["controller", "raylet", "head"]),
        ("environment", ["environment worker"]),
    ],
)
def test_run_that_loses_processes_in_turn_ends_with_the_same_bits(
    campaign: Campaign, name: str, kinds: list[str]
) -> None:
    kills = [(kind, Moment(2 * number, 0)) for number, kind in enumerate(kinds, 1)]
    statuses, differing = campaign.run_script(name, kills, ONE_WORKER)
    assert statuses[-1] == 0 and statuses.count(0) == 1, statuses
    assert len(statuses) == 1 + sum(KINDS[kind].ends_run for kind in kinds), statuses
    assert differing == []


def test_read_results_goes_on_after_a_torn_line_and_write_page_keeps_the_text_around_the_table(tmp_path: Path) -> None:
    lines = [json.dumps(asdict(outcome)) for outcome in (LOST, BAD)]
    (tmp_path / "results.jsonl").write_text("\n".join([lines[0], lines[1][:40], lines[1]]))
    assert read_results(tmp_path) == [LOST, BAD] and LOST.good and not BAD.good
    assert read_results(tmp_path / "none") == []
    row = "| engine | 2 | 1 | 1 | 1 | 19, 30 |"
    assert table([LOST, BAD]).splitlines()[2:] == [row]
    page = tmp_path / "kills.md"
    page.write_text("before\n<!-- kills -->\nold\n<!-- end kills -->\nafter\n")
    write_page([LOST, BAD], page)
    text = page.read_text()
    assert text.startswith("before\n<!-- kills -->\n| killed") and text.endswith(f"{row}\n<!-- end kills -->\nafter\n")


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
    before = set(os.listdir("/dev/shm"))
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
            env={**os.environ, MARK: "mine"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None and process.stdout.readline()
            left = left_behind("mine", tmp_path, before, patience_s=0.1)
            assert process.wait() == -9
    finally:
        memory.unlink()
    assert [entry for entry in left if "left-" in entry or "pymp" in entry] == [str(memory), "pymp-1"]
    assert left[0].startswith("process ") and program in left[0]
