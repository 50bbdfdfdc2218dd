from __future__ import annotations

import json
import subprocess

import pytest

from rl_plugins.launch.tracking import describe_run
from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tracking.provenance import git_tags, write_provenance


def test_write_provenance_writes_the_versions_and_the_state_of_git(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    (tmp_path / "train.py").write_text("old\n")
    for command in (["init", "-q"], ["add", "train.py"], ["commit", "-qm", "start"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    (tmp_path / "train.py").write_text("new\n")
    (tmp_path / "outputs").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "outputs")
    write_provenance(folder)
    assert "\ntorch==" in folder.environment.read_text()
    assert "-old\n+new\n" in folder.git_diff.read_text()
    state = json.loads(folder.git_state.read_text())
    assert state["changes"][0] == " M train.py"
    assert git_tags(folder)["mlflow.source.git.commit"] == state["commit"]


def test_write_provenance_outside_of_git_writes_the_versions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path)
    write_provenance(folder)
    assert folder.environment.is_file() and git_tags(folder) == {}


@pytest.mark.parametrize(
    ("recipe", "options", "expected"),
    [
        ("grpo", ["algorithm=rloo"], ("rloo", "ppo_clip", 2)),
        ("grpo", ["algorithm=gspo", "launcher=local"], ("grpo", "gspo", 1)),
        ("preference_optimization", [], (None, "dpo", 2)),
    ],
)
def test_describe_run_names_algorithm_loss_and_workers(recipe, options, expected, tmp_path):
    config = configured(recipe, "model.path=model", "placement.num_workers=2", *options)
    params = describe_run(config, RunFolder(tmp_path)).params
    assert tuple(params.get(name) for name in ("advantage", "loss", "workers")) == expected
