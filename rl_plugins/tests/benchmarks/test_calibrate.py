"""Measured runs that a calibration keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import calibrate
from benchmarks.plan_work import prepare_tiny
from benchmarks.runs import MeasuredRun


def test_run_at_keeps_a_run_in_a_missing_folder_and_does_not_repeat_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def run_grpo(folder: Path, *overrides: str, name: str, closely: bool) -> MeasuredRun:
        names.append(name)
        return MeasuredRun([{"train/response_length": 5.0}] * 2)

    monkeypatch.setattr(calibrate, "run_grpo", run_grpo)
    prepare_tiny(tmp_path / "tiny")
    for _ in range(2):
        _, work = calibrate.run_at(tmp_path / "tiny", calibrate.TINY, tmp_path / "runs" / "kept")
        assert work.response_tokens == 5.0
    assert len(names) == 1
