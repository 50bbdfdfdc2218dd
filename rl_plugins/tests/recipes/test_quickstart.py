"""The quickstart without the training: its configurations, and the commands that it prints."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rl_plugins.launch.command_line import compose_config
from rl_plugins.recipes import quickstart
from rl_plugins.recipes.quickstart import print_outcome
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.report.handmade_run import handmade_run

LABELS = ("MLflow", "try next")


@pytest.fixture
def started(monkeypatch):
    """The configurations that `run_recipe` was given; nothing is trained."""
    configs = []

    def run_recipe(config, _):
        configs.append(config)
        return RunFolder(Path(config.run.output_dir) / config.run.name)

    monkeypatch.setattr(quickstart, "run_recipe", run_recipe)
    for made in ("write_sums", "save_base"):
        monkeypatch.setattr(quickstart, made, lambda *_: None)
    monkeypatch.setattr(quickstart, "print_outcome", lambda *_: True)
    for name in ("OMP_WAIT_POLICY", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, "")
    return configs


@pytest.mark.parametrize("folder", ["plain", "größe (copy)", 'it\'s #1 & [2], ~{3}="4"'])
def test_quickstart_starts_in_a_folder_of_any_name(folder, tmp_path, started, monkeypatch):
    here = tmp_path / folder
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", ["quickstart", f"folder=to {folder}", "run.steps=3"])
    with pytest.raises(SystemExit) as exit_:
        quickstart.main()
    assert exit_.value.code == 0
    made = here / f"to {folder}"
    sft, grpo = started
    for config, rows in ((sft, "dev"), (grpo, "test")):
        assert config.run.output_dir == str(made)
        assert config.tracking.uri == f"sqlite:///{made}/mlflow.db"
        assert config.data.train_files == [f"{made}/data/train.parquet"]
        assert config.data.val_files == [f"{made}/data/{rows}.parquet"]
    assert (sft.model.path, grpo.model.path) == (f"to {folder}/base", f"{made}/sft/policy")
    assert grpo.run.steps == 3


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
