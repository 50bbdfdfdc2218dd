from __future__ import annotations

import json
import subprocess

from rl_plugins.run_folder import RunFolder
from rl_plugins.tracking.provenance import source_tags, write_provenance


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
    assert "\ntorch==" in folder.installed_packages.read_text()
    assert "-old\n+new\n" in folder.git_diff.read_text()
    write_provenance(folder, code=False)
    assert folder.git_state.is_file() and not folder.git_diff.exists()
    state = json.loads(folder.git_state.read_text())
    assert state["changes"][0] == " M train.py"
    assert source_tags(folder)["mlflow.source.git.commit"] == state["commit"]


def test_write_provenance_outside_of_git_writes_the_versions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path)
    write_provenance(folder)
    assert folder.installed_packages.is_file() and source_tags(folder).keys() == {
        "mlflow.source.name",
        "mlflow.source.type",
    }
