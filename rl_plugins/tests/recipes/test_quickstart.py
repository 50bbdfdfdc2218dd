"""The quickstart without the training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rl_plugins.recipes import quickstart
from rl_plugins.run_folder import RunFolder


@pytest.fixture
def started(monkeypatch):
    """Configurations given to `run_recipe`; nothing is trained."""
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
