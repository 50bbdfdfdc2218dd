"""The search for samples in the memory of processes, and the end of the run after the search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import memory_search, sample_path
from benchmarks.sample_path import Driver, Search
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.other_user import CHANGE_USER, needs_root
from rl_plugins.tests.patience import is_running, patient, wait_until

SEARCH_AS_OTHER_USER = f"""
import os, subprocess
from benchmarks import memory_search
{CHANGE_USER}
process = subprocess.Popen(["true"])
os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
assert memory_search.search(str(process.pid), []) == 0
assert process.wait() == 0
"""


def test_search_finds_nothing_in_an_ended_process() -> None:
    wanted = [memory_search.encodings([1, 2, 3])]
    with subprocess.Popen(["true"]) as process:
        wait_until(lambda: not is_running(process.pid), "the end of the process")
        # Nobody has waited for the process yet.
        assert memory_search.search(str(process.pid), wanted) == 0
    assert memory_search.search(str(process.pid), wanted) == 0


@needs_root
def test_search_of_another_user_finds_nothing_in_an_ended_process() -> None:
    subprocess.run([sys.executable, "-c", SEARCH_AS_OTHER_USER], check=True, timeout=patient(30))


def test_run_of_search_stops_the_training_run_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, notes = RunFolder(tmp_path / "run"), tmp_path / "notes"
    folder.path.mkdir()
    notes.mkdir()
    folder.metrics.write_text('{"step": 2, "train/loss": 0.5}\n')

    def fail(stretches: list[list[int]]) -> dict[str, int]:
        assert (notes / "hold").exists()
        raise OSError("no memory")

    monkeypatch.setattr(sample_path, "search", fail)
    monkeypatch.setattr(sample_path.time, "sleep", lambda seconds: None)
    with pytest.raises(OSError, match="no memory"):
        Search(folder, notes, 2, Driver()).run()
    assert (folder.path / "stop").exists() and not (notes / "hold").exists()
