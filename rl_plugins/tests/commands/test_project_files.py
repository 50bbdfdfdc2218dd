"""The selection of a project's files for a Ray job, and the zip file."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from rl_plugins.commands.project_files import files_to_send, zip_files
from rl_plugins.errors import ConfigError
from rl_plugins.tracking.provenance import GIT_STATE_FILE, git_state


def git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


def write(folder: Path, *names: str, size: int = 10) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * size)


def sent(folder: Path, **patterns: list[str]) -> set[str]:
    return {path.as_posix() for path in files_to_send(folder, **patterns)[0]}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a package, a link to the package, and files to leave out."""
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


def test_files_to_send_of_a_repository_are_tracked_or_new(project: Path) -> None:
    assert sent(project) == {".gitignore", "train.py", "new.py", "package/data/rows.py", "package/model.py"} | LINKED


def test_files_to_send_leaves_out_a_tracked_file_that_is_deleted(project: Path) -> None:
    (project / "train.py").unlink()
    assert "train.py" not in sent(project)


def test_files_to_send_has_the_files_of_submodules(project: Path) -> None:
    before = sent(project)
    write(project, "library/code.py", "library/run.log")
    git(project / "library", "init", "-q")
    (project / "library" / ".gitignore").write_text("*.log\n")
    git(project / "library", "add", ".")
    git(project / "library", "commit", "-qm", "start")
    write(project, "library/new.py")
    for _ in range(2):
        assert sent(project) == before | {"library/.gitignore", "library/code.py", "library/new.py"}
        git(project, "add", "library")


def test_files_to_send_has_ignored_files_of_submodules_with_include(project: Path) -> None:
    write(project, "library/code.py", "library/run.log", "library/deep/run.log", "library/deep/code.py")
    for folder in (project / "library", project / "library" / "deep"):
        git(folder, "init", "-q")
    (project / "library" / ".gitignore").write_text("*.log\ndeep/\n")
    ignored = {"library/run.log", "library/deep/run.log"}
    assert sent(project) & ignored == set()
    for pattern, names in {"library/run.log": {"library/run.log"}, "library/deep": {"library/deep/run.log"}}.items():
        assert sent(project, include=[pattern]) & ignored == names, pattern
    # git ignores the whole folder, so the pattern gives this file alone.
    deep = {path for path in sent(project, include=["library/deep/run.log"]) if path.startswith("library/deep")}
    assert deep == {"library/deep/run.log"}


def test_files_to_send_asks_nothing_of_a_repository_to_leave_out(project: Path) -> None:
    before = sent(project)
    for name in ("outputs/clone", "cloned"):
        write(project, f"{name}/code.py")
        git(project / name, "init", "-q")
        # git refuses this repository, as it refuses a repository of another user.
        (project / name / ".git" / "config").write_text("[")
    assert sent(project, exclude=["cloned"]) == before
    assert sent(project, exclude=["cloned"], include=["run.log"]) == before | {"run.log"}
    for patterns in ({}, {"exclude": ["cloned"], "include": ["outputs/clone/code.py"]}):
        with pytest.raises(ConfigError, match="git cannot list the files of"):
            files_to_send(project, **patterns)


def test_files_to_send_without_a_repository_are_all_light_files(project: Path, tmp_path: Path) -> None:
    (project / ".git").rename(tmp_path / "gone")
    light = {".gitignore", "train.py", "new.py", "package/data/rows.py", "package/model.py", "secret/key", "run.log"}
    assert sent(project) == light | LINKED


def test_files_to_send_without_the_program_git_are_all_light_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert {"train.py", "secret/key"} <= sent(project)


@pytest.mark.parametrize("below", ["", "package"])
def test_files_to_send_fails_if_git_refuses_the_repository(
    project: Path, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No settings of this machine: a setting may allow folders of other users.
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(ConfigError, match=r"git cannot list.*dubious ownership.*safe\.directory.*--folder") as error:
        files_to_send(project / below)
    assert "\n" not in str(error.value)


def test_files_to_send_fails_for_a_broken_repository(project: Path) -> None:
    (project / ".git" / "HEAD").unlink()
    with pytest.raises(ConfigError, match=r"git cannot list the files of .*not a git repository"):
        files_to_send(project)


def test_files_to_send_of_an_ignored_folder_needs_include(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"git lists no file of .*secret: .*--include PATTERN.*git init"):
        files_to_send(project / "secret")
    assert sent(project / "secret", include=["k*"]) == {"key"}


def test_files_to_send_follows_exclude_and_include(project: Path) -> None:
    names = sent(project, exclude=["package/data", "new.py"], include=["package/*.parquet", "secret/key"])
    # The files of a linked folder are sent twice.
    shared = {f"{folder}/{name}" for folder in ("package", "linked") for name in ("model.py", "vectors.parquet")}
    assert names == {".gitignore", "train.py", "secret/key"} | shared


def test_files_to_send_names_a_link_out_of_the_project(project: Path, tmp_path: Path) -> None:
    write(tmp_path, "big/rows.txt")
    (project / "rows").symlink_to(tmp_path / "big")
    with pytest.raises(ConfigError, match=r"rows leads out of the project.*--exclude 'rows'"):
        files_to_send(project)
    assert "rows" not in sent(project, exclude=["rows"])


SECRETS = [
    ".env", "conf/.env.local", "prod.env", "id_rsa", "keys/ID_ED25519", "tls/server.pem", "a.key", ".netrc",
    ".git-credentials", ".aws/credentials", ".ssh/config", "secrets.yaml", "credentials.json", "deploy",
]  # fmt: skip


@pytest.mark.parametrize("tracked", [True, False], ids=["tracked", "new"])
def test_files_to_send_leaves_out_and_names_files_with_secrets(project: Path, tracked: bool) -> None:
    before = sent(project)
    write(project, *SECRETS, "package/keys.py", ".environment")
    (project / "deploy").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    (project / "settings").symlink_to(".env")
    (project / "cloud").symlink_to(".aws")
    if tracked:
        git(project, "add", "-f", ".")
    names = sent(project, include=["*", "conf/*"]) if tracked else sent(project)
    assert names & {*SECRETS, "settings", "cloud/credentials"} == set()
    assert names >= before | {"package/keys.py", "linked/keys.py", ".environment"}
    assert set(files_to_send(project)[1]) == {*SECRETS, "settings", "cloud/credentials"}
    assert ".env" in sent(project, include=[".env"])


def test_zip_files_has_no_secret_in_the_state_of_git(project: Path, tmp_path: Path) -> None:
    write(project, ".env", ".aws/credentials")
    git(project, "add", ".env", ".aws")
    git(project, "commit", "-qm", "secrets")
    for name in (".env", ".aws/credentials"):
        (project / name).write_text("secret of a file\n")
    (project / "train.py").write_text('judge(api_key="sk-1", path="data")\n')
    zip_files(files_to_send(project)[0], project, tmp_path / "project.zip", limit_mib=1)
    with zipfile.ZipFile(tmp_path / "project.zip") as package:
        state = package.read(GIT_STATE_FILE).decode()
    assert "+judge(api_key=***, path=" in state and "secret of a file" not in state and "sk-1" not in state


def test_zip_files_names_the_largest_files_of_a_project_above_the_limit(project: Path, tmp_path: Path) -> None:
    write(project, "corpus/a.txt", "corpus/b.txt", size=2**20)
    with pytest.raises(ConfigError, match=r"2\.0 MiB.*above --limit 1") as error:
        zip_files(files_to_send(project)[0], project, tmp_path / "project.zip", limit_mib=1)
    assert "The largest: 2.0 MiB corpus/, 1.0 MiB corpus/a.txt, 1.0 MiB corpus/b.txt" in str(error.value)
    assert "--exclude" in str(error.value) and not (tmp_path / "project.zip").exists()


def test_zip_files_makes_equal_packages_of_equal_files(project: Path, tmp_path: Path) -> None:
    for name in ("first.zip", "second.zip"):
        zip_files(files_to_send(project)[0], project, tmp_path / name, limit_mib=1)
        (project / "train.py").touch()
    assert (tmp_path / "first.zip").read_bytes() == (tmp_path / "second.zip").read_bytes()


def test_zip_files_puts_the_state_of_git_into_the_package(project: Path, tmp_path: Path) -> None:
    (project / "train.py").write_text("changed\n")
    zip_files(files_to_send(project)[0], project, tmp_path / "project.zip", limit_mib=1)
    with zipfile.ZipFile(tmp_path / "project.zip") as package:
        package.extractall(tmp_path / "unpacked")
    state = git_state(tmp_path / "unpacked")
    assert state == git_state(project) == json.loads((tmp_path / "unpacked" / GIT_STATE_FILE).read_text())
    assert state is not None and len(state["commit"]) == 40
    assert " M train.py" in state["changes"] and "+changed" in state["diff"]


def test_files_to_send_of_a_project_in_an_environment_leave_out_the_environment(tmp_path: Path) -> None:
    write(tmp_path, "pyvenv.cfg", "train.py", "lib/python3.11/site-packages/x.py", "bin/python", "package/model.py")
    (tmp_path / "lib64").symlink_to("lib")
    assert sent(tmp_path) == {"train.py", "package/model.py"}
