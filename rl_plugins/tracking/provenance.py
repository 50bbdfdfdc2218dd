"""Provenance of a run: installed versions, the state of the code, and digests of data files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

from rl_plugins.errors import ConfigError
from rl_plugins.redaction import SECRET_FILES, redacted_code, redacted_words
from rl_plugins.run_folder import RunFolder
from rl_plugins.text_file import REMOVE, read_json_object, read_text
from rl_plugins.whole_file import write_whole_text

GIT_STATE_FILE = ".git_state.json"
"""File with the git state, in the working folder of a Ray job, because Ray gets a project without its repository."""

_GIT_TIMEOUT_S = 20
_MAX_DIFF_CHARACTERS = 2**20
_DIGEST_LENGTH = 32
"""Number of hexadecimal digits that are kept of SHA-256; MLflow allows 36."""


def write_provenance(folder: RunFolder, *, code: bool = True) -> None:
    """Write the installed versions, and the git state if the working directory is in a git repository.

    The files are `environment.txt`, `git.json` and `git.diff`.

    Args:
        folder: folder of the run.
        code: write `git.diff`. An older `git.diff` is removed otherwise.
    """
    # Every access to `.metadata` reads the metadata file again.
    metadata = [distribution.metadata for distribution in importlib.metadata.distributions()]
    installed = {f"{fields['Name']}=={fields['Version']}" for fields in metadata}
    head = [
        f"# python {platform.python_version()} on {platform.platform()}",
        f"# {shlex.join(redacted_words(sys.argv))}",
    ]
    write_whole_text(folder.installed_packages, "\n".join([*head, *sorted(installed, key=str.lower), ""]))
    state = git_state(Path.cwd())
    if state is not None:
        summary = {"commit": state["commit"], "changes": state["changes"]}
        write_whole_text(folder.git_state, json.dumps(summary, indent=1))
    if state is not None and code:
        write_whole_text(folder.git_diff, state["diff"])
    else:
        folder.git_diff.unlink(missing_ok=True)


def source_tags(folder: RunFolder) -> dict[str, str]:
    """Return MLflow tags: the command of a run, its commit, and the number of files with uncommitted changes.

    Raises:
        ConfigError: a file of the run is damaged.
    """
    tags: dict[str, str] = {}
    if folder.installed_packages.is_file():
        command = "".join(read_text(folder.installed_packages, REMOVE).splitlines()[1:2]).removeprefix("# ")
        # A worker of Ray would name its own file.
        tags |= {"mlflow.source.name": command, "mlflow.source.type": "LOCAL"}
    if folder.git_state.is_file():
        state = read_git_state(folder.git_state)
        tags |= {"mlflow.source.git.commit": state["commit"], "git.changed_files": str(len(state["changes"]))}
    return tags


class GitSummary(TypedDict):
    """Git state of a project without the changes in its files.

    Attributes:
        commit: full hash of the checked-out commit.
        changes: lines of `git status --short`, one for each changed file.
    """

    commit: str
    changes: list[str]


class GitState(GitSummary):
    """Git state of a project.

    Attributes:
        diff: changes of tracked files, without secrets; a note if the text is longer than 1 MiB.
    """

    diff: str


def read_git_state(file: Path) -> GitSummary:
    """Read the `git.json` of a run.

    Raises:
        ConfigError: the file is damaged.
    """
    state = read_json_object(file, REMOVE)
    commit, changes = state.get("commit"), state.get("changes")
    if not isinstance(commit, str) or not isinstance(changes, list):
        raise ConfigError(f"{file}: not the commit and the changes of a project: {REMOVE}")
    return GitSummary(commit=commit, changes=changes)


def git_state(folder: Path) -> GitState | None:
    """Return the git state of the project in a folder; None without a repository and without `GIT_STATE_FILE`."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        file = folder / GIT_STATE_FILE
        state: GitState | None = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        return state
    left_out = (f":(exclude,top,glob,icase)**/{name}{end}" for name in SECRET_FILES for end in ("", "/**"))
    diff = redacted_code(_git(folder, "diff", "HEAD", "--", ":(top)", *left_out) or "")
    if len(diff) > _MAX_DIFF_CHARACTERS:
        diff = f"{len(diff)} characters, too long to be kept\n"
    return GitState(commit=commit.strip(), changes=(_git(folder, "status", "--short") or "").splitlines(), diff=diff)


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if the command fails or git is not installed."""
    try:
        outcome = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return None if outcome.returncode else outcome.stdout.decode("utf-8", errors="replace")


@dataclass(frozen=True)
class DataFile:
    """Description of a data file for a tracking store.

    Attributes:
        name: names of the folder and the file, joined by a slash.
        digest: shortened SHA-256 of the content.
        source: location of the file, as JSON.
        profile: size, and for Parquet the number of rows and the columns, as JSON.
    """

    name: str
    digest: str
    source: str
    profile: str


def describe_file(path: Path) -> DataFile:
    """Describe a data file. A file without a change since the last call is not read again."""
    status = path.stat()
    return _describe(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _describe(path: Path, size: int, mtime_ns: int) -> DataFile:
    profile: dict[str, object] = {"bytes": size}
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        profile |= {"rows": metadata.num_rows, "columns": metadata.schema.to_arrow_schema().names}
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_LENGTH]
    return DataFile(
        name=f"{path.parent.name}/{path.name}",
        digest=digest,
        source=json.dumps({"uri": str(path)}),
        profile=json.dumps(profile),
    )
