from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import soak
from benchmarks.soak import MEMORY, PROCESSES, STEP, SoakWatch, slope, table
from rl_plugins.tests.patience import wait_until


def test_watch_counts_processes_and_knows_the_process_of_the_tools(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 3, "train/loss": 0.5}\n')
    watch = SoakWatch(os.getpid(), metrics, tmp_path, every_s=0.01)
    with watch:
        wait_until(lambda: watch.seen["all", PROCESSES], "a measurement")
        before = watch.seen["all", PROCESSES][-1][1]
        code = "import sys; sys.stdin.read()  # rl_plugins.environments.tool_process"
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE):
            wait_until(lambda: watch.seen["process of the tools", MEMORY], "the process of the tools")
            wait_until(lambda: (3, before + 1) in watch.seen["all", PROCESSES], "one more process")


def test_slope_is_the_growth_per_100_steps_after_the_warm_up() -> None:
    # The jump in the first fifth does not count.
    points = [(float(step), 50.0 if step <= 20 else 100 + 0.5 * step) for step in range(101)]
    assert slope(points, 100) == pytest.approx(50)
    assert slope(points[:25], 100) == pytest.approx(50)
    assert slope(points[:21], 100) == 0 and slope([(30.0, 1.0), (30.0, 2.0)], 100) == 0


def test_table_has_a_line_for_each_figure() -> None:
    seen = {("driver", MEMORY): [(25.0, 10.0), (50.0, 12.0)], ("all", STEP): [(25.0, 0.5), (50.0, 0.5)]}
    assert table(seen, 100).splitlines()[2:] == [
        "| all | step, s | 0.5 | 0.5 | +0 |", "| driver | memory, MB | 10 | 12 | +8 |"
    ]  # fmt: skip


def test_page_of_soak_has_the_command_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "run", lambda *arguments: {("all", STEP): [(25.0, 0.5), (50.0, 0.5)]})
    page = tmp_path / "page.md"
    for further, command in (
        ([], "make soak STEPS=9"),
        (["--set", "a=1", "b=[x y]"], "python -m benchmarks.soak --steps 9 --set a=1 'b=[x y]'"),
        (["--every", "0.5"], "python -m benchmarks.soak --steps 9 --every 0.5"),
        (["--every", "2", "--set", "a=1"], "python -m benchmarks.soak --steps 9 --every 2 --set a=1"),
    ):
        soak.main(["--steps", "9", "--out", str(page), *further])
        assert page.read_text().splitlines()[2] == f"`{command}`"
