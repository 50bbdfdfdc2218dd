"""What a run was started from, as files in its folder: the versions of what is installed, and the state of the code."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from pathlib import Path

from rl_plugins.launch.git_state import git_state
from rl_plugins.run_folder import RunFolder


def write_provenance(folder: RunFolder) -> None:
    """Write `environment.txt`, and `git.json` and `git.diff` where the working directory is a project of git."""
    # Each look at `metadata` reads its file again.
    metadata = [found.metadata for found in importlib.metadata.distributions()]
    installed = {f"{fields['Name']}=={fields['Version']}" for fields in metadata}
    head = [f"# python {platform.python_version()} on {platform.platform()}", f"# {' '.join(sys.argv)}"]
    folder.environment.write_text("\n".join([*head, *sorted(installed, key=str.lower), ""]), encoding="utf-8")
    state = git_state(Path.cwd())
    if state is not None:
        summary = {"commit": state["commit"], "changes": state["changes"]}
        folder.git_state.write_text(json.dumps(summary, indent=1), encoding="utf-8")
        folder.git_diff.write_text(state["diff"], encoding="utf-8")


def code_tags(folder: RunFolder) -> dict[str, str]:
    """The commit that a run was started from, under MLflow's name for it, and how many files differed from it."""
    if not folder.git_state.is_file():
        return {}
    state = json.loads(folder.git_state.read_text(encoding="utf-8"))
    return {"mlflow.source.git.commit": state["commit"], "git.changed_files": str(len(state["changes"]))}
