"""Models and data sets of the Hugging Face hub in the options of a run: a commit for each, kept in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.hub.names import HubName, model_name, pin
from rl_plugins.json_text import read_foreign_json
from rl_plugins.launch.stored_run import StoredRun
from rl_plugins.run_folder import RunFolder
from rl_plugins.whole_file import write_whole_text

SCHEME = "hf://"
"""Beginning of an address on the hub."""


class HubCommits:
    """Commits of the repositories of a run. A repository that is known is not looked up again.

    Args:
        known: commit by name, such as `models/OWNER/NAME@main`.
    """

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self.commits = dict(known or {})

    @classmethod
    def of_run(cls, folder: RunFolder, stored: StoredRun | None = None) -> HubCommits:
        """Return the commits of an earlier start of a run or a pipeline; none if there was no earlier start.

        Args:
            folder: folder of the run.
            stored: copy of the run in storage.

        Raises:
            ConfigError: the file is damaged.
        """
        if folder.hub.is_file():
            return cls(_read(folder.hub.read_bytes(), str(folder.hub)))
        content = None if stored is None else stored.read(folder.hub.name)
        return cls() if content is None else cls(_read(content, f"{folder.hub.name} in run.storage"))

    def pin(self, option: str, name: HubName) -> HubName:
        """Return a name with its commit.

        Raises:
            ConfigError: the hub does not know the name, refuses, or does not answer.
        """
        key = f"{name.kind}s/{replace(name, revision=name.revision or 'main')}"
        if key not in self.commits:
            self.commits[key] = str(pin(name, option).revision)
        return replace(name, revision=self.commits[key])

    def write(self, file: Path) -> None:
        """Write the commits into a file, if there are any.

        Raises:
            StorageError: the file cannot be written.
        """
        if self.commits:
            write_whole_text(file, json.dumps(self.commits, indent=1) + "\n")


def _read(content: bytes, file: str) -> dict[str, str]:
    try:
        commits = read_foreign_json(content)
    except ValueError:
        commits = None
    if not isinstance(commits, dict) or not all(
        isinstance(commit, str) and HubName("", commit).is_pinned for commit in commits.values()
    ):
        raise ConfigError(
            f"{file} is damaged: it must name a commit for each repository; remove it to look them up again"
        )
    return commits


def pinned_model(commits: HubCommits, option: str, path: str) -> str:
    """Return the path of a model with the commit, if the path is a name on the hub; else the path.

    Raises:
        ConfigError: see `HubCommits.pin`.
    """
    if path.startswith(SCHEME):
        raise ConfigError(
            f"{option}={path}: a model of the hub has no address: name it OWNER/NAME or OWNER/NAME@REVISION"
        )
    name = model_name(path)
    return path if name is None else str(commits.pin(option, name))
