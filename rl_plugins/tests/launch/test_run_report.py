from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.launch.run_report import reported, write_changes
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.launch.configurations import compose_config_once, configured


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    return RunFolder(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("no <engine>"), KeyboardInterrupt()])
def test_reported_writes_the_end_of_the_run_into_the_report(folder: RunFolder, error: BaseException) -> None:
    with pytest.raises(type(error)), reported(folder):
        raise error
    assert f"Ended by an error: {type(error).__name__}" in folder.report.read_text()
    with reported(folder):
        pass
    assert "Ended by an error" not in folder.report.read_text()


def test_reported_writes_no_report_without_metrics_and_raises_the_error_of_the_run(folder: RunFolder) -> None:
    folder.metrics.unlink()
    with pytest.raises(RuntimeError, match="no engine"), reported(folder):
        raise RuntimeError("no engine")
    assert not folder.report.exists()


def test_write_changes_notes_the_options_that_differ_from_the_recipe(folder: RunFolder) -> None:
    overrides = ["model.path=tiny", "data.train_files=[a.parquet]", "reward=exact_match", "optimizer.lr=0.5"]
    write_changes(folder, "grpo", compose_config_once("grpo", ()), configured("grpo", *overrides))
    changes = folder.changes.read_text().splitlines()
    assert changes[0] == "# recipe: grpo"
    assert "optimizer.lr: 0.5  # recipe: 1.0e-06" in changes and "model.path: tiny  # recipe: ???" in changes
    assert len(changes) < 8
