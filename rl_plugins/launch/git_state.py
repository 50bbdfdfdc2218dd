"""Which state of the code a run was started from: git's commit, and what differs from it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TypedDict

SENT_STATE = ".git_state.json"
"""Holds the state where a project was sent without its repository: at the root of a Ray job's working folder."""

_TIMEOUT_S = 20
_MAX_DIFF_BYTES = 2**20


class GitState(TypedDict):
    """What git says of a project.

    Attributes:
        commit: full hash.
        changes: one line for each file that differs from the commit, as `git status --short` has it.
        diff: the text of the changes to tracked files; says so where it is too long to be kept.
    """

    commit: str
    changes: list[str]
    diff: str


def git_state(folder: Path) -> GitState | None:
    """The state of the project in `folder`; None where there is neither a repository nor a record of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        sent = folder / SENT_STATE
        state: GitState | None = json.loads(sent.read_text(encoding="utf-8")) if sent.is_file() else None
        return state
    diff = _git(folder, "diff", "HEAD") or ""
    if len(diff) > _MAX_DIFF_BYTES:
        diff = f"{len(diff)} characters, too long to be kept\n"
    return GitState(commit=commit.strip(), changes=(_git(folder, "status", "--short") or "").splitlines(), diff=diff)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails, or is not there."""
    try:
        outcome = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return None if outcome.returncode else outcome.stdout.decode("utf-8", errors="replace")
