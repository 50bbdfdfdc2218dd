"""`rl-plugins sync`: a run or a stage that is running keeps its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.commands.main import main
from rl_plugins.run_folder import RunFolder
from rl_plugins.run_lock import owned


def content(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != ".lock"}


def test_sync_refuses_a_running_run_pipeline_or_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, stage = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "pipeline" / "first")
    for folder in (run, stage):
        folder.path.mkdir(parents=True)
        folder.config.write_text("stage: sft\n")
    pipeline = "experiment: own\ntracking_uri: sqlite:////gone/a.db\nstages: {first: {}}\n"
    RunFolder(tmp_path / "pipeline").pipeline.write_text(pipeline)
    with owned(run), owned(stage):
        before = content(tmp_path)
        for path, running in ((run.path, run), (tmp_path / "pipeline", stage)):
            assert main(["sync", str(path)]) == 2
            assert f"{running.path} belongs to a running run" in capsys.readouterr().err
        assert content(tmp_path) == before
    with owned(RunFolder(tmp_path / "pipeline"), "pipeline"):
        assert main(["sync", str(tmp_path / "pipeline")]) == 2
        assert f"{tmp_path / 'pipeline'} belongs to a running pipeline" in capsys.readouterr().err
