from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.launch.command_line import compose_config
from rl_plugins.launch.config import parse_config
from rl_plugins.launch.run_report import reported, write_changes
from rl_plugins.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n')
    return RunFolder(tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("no <engine>"), KeyboardInterrupt()])
def test_a_run_that_fails_or_is_stopped_has_a_report_which_says_so(folder: RunFolder, error: BaseException) -> None:
    with pytest.raises(type(error)), reported(folder):
        raise error
    assert f"Ended by an error: {type(error).__name__}" in folder.report.read_text()
    with reported(folder):
        pass
    assert "Ended by an error" not in folder.report.read_text()


def test_without_metrics_there_is_no_report_and_the_error_is_the_run_s(folder: RunFolder) -> None:
    folder.metrics.unlink()
    with pytest.raises(RuntimeError, match="no engine"), reported(folder):
        raise RuntimeError("no engine")
    assert not folder.report.exists()


def test_what_differs_from_the_recipe_is_noted(folder: RunFolder) -> None:
    overrides = ["model.path=tiny", "data.train_files=[a.parquet]", "reward=exact_match", "optimizer.lr=0.5"]
    config = parse_config(compose_config("grpo", overrides))
    write_changes(folder, "grpo", compose_config("grpo", []), config)
    changes = folder.changes.read_text().splitlines()
    assert changes[0] == "# recipe: grpo"
    assert "optimizer.lr: 0.5  # recipe: 1.0e-06" in changes and "model.path: tiny  # recipe: ???" in changes
    assert len(changes) < 8
