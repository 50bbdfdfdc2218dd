"""`rl-plugins show` on the folder of a run, also during the run."""

from __future__ import annotations

import json

import pytest

from rl_plugins.commands.main import main
from rl_plugins.commands.show import sparkline
from rl_plugins.run_folder import read_metrics


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "grpo"
    (folder / "samples").mkdir(parents=True)
    rows = [{"step": s, "train/reward": s / 40, "time/rollout": 0.3, "time/reward": 0.1, "own": 1.0} for s in range(40)]
    rows.insert(3, {"step": 0, "val/reward": 0.25, "val/sums/best_at_8": 0.5, "val/sums/best_at_8_low": 0.4})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sample = {"prompt": "[bold]1+1=", "response": "2" * 900, "ground_truth": "2", "score": 0.5, "failure": None}
    failed = {**sample, "score": None, "failure": "timeout"}
    (folder / "samples" / "step_00000000.json").write_text(json.dumps([failed]))
    (folder / "samples" / "step_00000020.json").write_text(json.dumps([sample, failed, sample]))
    (folder / "checkpoint_00000020").mkdir()
    return folder


def test_show_prints_curves_phases_samples_and_folders(run, capsys):
    assert main(["show", str(run), "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert "train/reward" in shown and "val/sums/best_at_8" in shown and "▁▁▂▂▂▃" in shown
    # A user's metrics and the ends of intervals are not main metrics.
    assert "own" not in shown and "_low" not in shown
    phases = shown[shown.index("seconds of a step") :]
    assert phases.index("  rollout ") < phases.index("  reward ") and "75%" in phases
    assert "2 of 3 samples" in shown and "step_00000020.json" in shown and "[bold]1+1=" in shown
    assert "score 0.5" in shown and "score failed (timeout)" in shown
    assert "2" * 400 + "..." in "".join(shown.split())
    assert f"last checkpoint  {run / 'checkpoint_00000020'}" in shown and "exported model" not in shown


def test_show_prints_the_metrics_of_the_option(run, capsys):
    assert main(["show", str(run), "--metrics", "ow?", "--samples", "0"]) == 0
    shown = capsys.readouterr().out
    assert "own" in shown and "train/reward" not in shown and "samples in" not in shown
    assert main(["show", str(run), "--metrics", "nothing*"]) == 2
    assert "has no metric nothing*; it has train/reward" in capsys.readouterr().err


def test_show_of_a_folder_of_runs_names_the_runs(run, capsys):
    assert main(["show", str(run.parent)]) == 2
    assert "there are runs in it: grpo" in capsys.readouterr().err


def test_read_metrics_leaves_out_an_unfinished_line(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/rew')
    assert max(read_metrics(run / "metrics.jsonl")["train/reward"]) == 39


def test_show_and_report_leave_out_and_count_damaged_lines(run, capsys):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "train/rew\n\x00\x00\n{"step": 41, "train/reward": 0.5}\n')
    assert main(["show", str(run)]) == 0
    assert f"left out         2 damaged lines of {run / 'metrics.jsonl'}" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert "Left out: 2 damaged lines of metrics.jsonl" in (run / "report.html").read_text()


def test_show_prints_control_characters_of_samples_as_pictures(run, capsys):
    hostile = "\x1b]0;title\x07\x1b[2J[red]:smile:[/blue]\x9b1m"
    sample = {"prompt": hostile, "response": hostile, "ground_truth": hostile, "score": 0.5, "failure": None}
    (run / "samples" / "step_00000030.json").write_text(json.dumps([sample]))
    assert main(["show", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("␛]0;title␇␛[2J[red]:smile:[/blue]\ufffd1m") == 3 and "\x1b" not in shown
    assert main(["show", str(run / hostile)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_sparkline_averages_neighbours():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁" and len(sparkline(list(range(1000)))) == 20
    # A peak is averaged with the values beside the peak, not dropped.
    assert sparkline([0.0] * 50 + [100.0] + [0.0] * 49)[10] == "█"
