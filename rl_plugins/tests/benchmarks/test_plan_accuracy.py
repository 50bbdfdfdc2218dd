"""Measurements of settings after a resume with kept measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plan_accuracy
from benchmarks.resident import Resident
from benchmarks.runs import MeasuredRun
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.planning.devices import CPU_FILE, device_named

KEPT, MISSING = "ZeRO-1 32-true", "ZeRO-2 32-true"
STEP = {"time": 1.0, "time/step": 3.0, "time/rollout": 2.0, "time/update_policy": 1.0, "train/response_length": 5.0}
POINTS = {("RayTrainWorker", 1): [(1.0, 2**30, 0)], ("VLLMActor", 2): [(1.0, 2**30, 0)]}


def test_measure_finds_policy_and_prompts_after_the_prediction_of_a_kept_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_grpo(folder: Path, *overrides: str, **options: object) -> MeasuredRun:
        assert (folder / "policy" / "config.json").is_file() and (folder / "data" / "train.parquet").is_file()
        return MeasuredRun([STEP, STEP], resident=Resident(POINTS))

    monkeypatch.setattr(plan_accuracy, "run_grpo", run_grpo)
    monkeypatch.setitem(plan_accuracy.MODELS, "28m", save_tiny_policy)
    predicted = plan_accuracy.predict(KEPT, device_named("cpu", CPU_FILE), tmp_path, response_tokens=5.0)
    measured = plan_accuracy.measure(MISSING, tmp_path)
    assert predicted.step > 0 and measured.step == 3.0
