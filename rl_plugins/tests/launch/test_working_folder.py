"""What a Ray job is sent: the project's files, never what is heavy."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.launch.git_state import SENT_STATE, git_state
from rl_plugins.launch.working_folder import files_to_send, zip_files


def git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


def write(folder: Path, *names: str, size: int = 10) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)


def sent(folder: Path, **patterns: list[str]) -> set[str]:
    return {path.as_posix() for path in files_to_send(folder, **patterns)}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a package, a link within it, and everything that must stay."""
    folder = tmp_path / "project"
    write(folder, "train.py", "package/data/rows.py", "package/model.py", "package/vectors.parquet")
    (folder / "linked").symlink_to("package")
    (folder / ".gitignore").write_text("secret/\n*.log\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "start")
    write(
        folder, "new.py", "secret/key", "run.log", "outputs/run/metrics.json", "package/checkpoint_00000002/state/a",
        "my_env/pyvenv.cfg", "my_env/lib/python/torch.py", "model.safetensors",
    )  # fmt: skip
    return folder


LINKED = {"linked/data/rows.py", "linked/model.py"}


def test_a_repository_sends_what_git_tracks_and_what_is_new(project: Path) -> None:
    assert sent(project) == {".gitignore", "train.py", "new.py", "package/data/rows.py", "package/model.py"} | LINKED


def test_a_tracked_file_that_is_deleted_is_not_missed(project: Path) -> None:
    (project / "train.py").unlink()
    assert "train.py" not in sent(project)


def test_without_git_everything_light_is_sent(project: Path, tmp_path: Path) -> None:
    (project / ".git").rename(tmp_path / "gone")
    light = {".gitignore", "train.py", "new.py", "package/data/rows.py", "package/model.py", "secret/key", "run.log"}
    assert sent(project) == light | LINKED


def test_without_the_program_git_everything_light_is_sent(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert {"train.py", "secret/key"} <= sent(project)


@pytest.mark.parametrize("below", ["", "package"])
def test_a_repository_that_git_refuses_does_not_send_what_is_ignored(
    project: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody's exceptions for folders of other users.
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(ConfigError, match=r"git cannot list.*dubious ownership.*safe\.directory.*--folder") as error:
        files_to_send(project / below)
    assert "\n" not in str(error.value)


def test_a_broken_repository_does_not_send_what_is_ignored(project: Path) -> None:
    (project / ".git" / "HEAD").unlink()
    with pytest.raises(ConfigError, match=r"git cannot list the files of .*not a git repository"):
        files_to_send(project)


def test_a_folder_that_its_repository_ignores_is_not_sent_unless_by_name(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"git lists no file of .*secret: .*--include PATTERN.*git init"):
        files_to_send(project / "secret")
    assert sent(project / "secret", include=["k*"]) == {"key"}


def test_patterns_leave_out_and_bring_back(project: Path) -> None:
    names = sent(project, exclude=["package/data", "new.py"], include=["package/*.parquet", "secret/key"])
    # A link brings what its folder brings.
    shared = {f"{folder}/{name}" for folder in ("package", "linked") for name in ("model.py", "vectors.parquet")}
    assert names == {".gitignore", "train.py", "secret/key"} | shared


def test_a_link_out_of_the_project_is_named(project: Path, tmp_path: Path) -> None:
    write(tmp_path, "big/rows.txt")
    (project / "rows").symlink_to(tmp_path / "big")
    with pytest.raises(ConfigError, match=r"rows leads out of the project.*--exclude 'rows'"):
        files_to_send(project)
    assert "rows" not in sent(project, exclude=["rows"])


def test_a_project_above_the_limit_says_what_is_large(project: Path, tmp_path: Path) -> None:
    write(project, "corpus/a.txt", "corpus/b.txt", size=2**20)
    with pytest.raises(ConfigError, match=r"2\.0 MiB.*above --limit 1") as error:
        zip_files(files_to_send(project), project, tmp_path / "project.zip", limit_mib=1)
    largest = str(error.value).splitlines()[1:4]
    assert [line.split()[-1] for line in largest] == ["corpus/", "corpus/a.txt", "corpus/b.txt"]
    assert "--exclude" in str(error.value) and not (tmp_path / "project.zip").exists()


def test_the_same_files_make_the_same_package(project: Path, tmp_path: Path) -> None:
    for name in ("first.zip", "second.zip"):
        zip_files(files_to_send(project), project, tmp_path / name, limit_mib=1)
        (project / "train.py").touch()
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()


def test_the_package_says_which_state_of_the_code_it_is(project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text("changed\n")
    zip_files(files_to_send(project), project, tmp_path / "project.zip", limit_mib=1)
    with zipfile.ZipFile(tmp_path / "project.zip") as package:
        package.extractall(tmp_path / "unpacked")
    state = git_state(tmp_path / "unpacked")
    assert state == git_state(project) == json.loads((tmp_path / "unpacked" / SENT_STATE).read_text())
    assert state is not None and len(state["commit"]) == 40
    assert " M train.py" in state["changes"] and "+changed" in state["diff"]
