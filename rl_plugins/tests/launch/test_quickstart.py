"""A shell accepts the commands printed by the quickstart."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.quickstart import print_outcome
from rl_plugins.tests.report.handmade_run import handmade_run

LABELS = ("MLflow", "try next")


@pytest.mark.parametrize("name", ["plain", "größe (it's #1)"])
def test_print_outcome_prints_commands_that_work_for_any_folder_name(name, tmp_path, monkeypatch, capsys):
    above = tmp_path / name
    above.mkdir()
    grpo = handmade_run(above / "grpo")
    monkeypatch.chdir(tmp_path)
    assert print_outcome(grpo, grpo, "", "", 1.0)
    printed = capsys.readouterr().out.splitlines()
    commands = {label: next(line.split(label)[1] for line in printed if line.startswith(label)) for label in LABELS}
    config = compose_config("quickstart_grpo", shlex.split(commands["try next"])[5:])
    assert (config.run.name, config.run.output_dir) == ("more", str(above))
    assert config.model.path == str(Path(name, "grpo", "policy"))
    assert config.data.train_files == [f"{above}/data/train.parquet"]
    assert config.data.val_files == [f"{above}/data/test.parquet"]
    assert f"sqlite:///{above}/mlflow.db" in shlex.split(commands["MLflow"])
    plain = f"run.output_dir={above} model.path={name}/grpo/policy 'data.train_files=[{above}/data/train.parquet]'"
    assert (plain in commands["try next"]) is (name == "plain")
