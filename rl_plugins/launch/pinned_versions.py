"""Versions of models and data sets in the options of a run, kept in the run's folder for resumes.

A name on the Hugging Face hub has a commit. In MLflow, an alias has a version, and a model of a run has an id.
"""

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
from rl_plugins.tracking.registry import is_fixed, resolve_model
from rl_plugins.whole_file import write_whole_text

SCHEME = "hf://"
"""Beginning of an address on the hub."""


class PinnedVersions:
    """Versions of the models and data sets of a run. A name that is known is not looked up again.

    Args:
        known: commit by name on the hub, such as `models/OWNER/NAME@main`, and URI with the version or the id by URI
            in MLflow, such as `models:/NAME@ALIAS`.

    Attributes:
        used: versions of the names in the options.
    """

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self.known, self.used = dict(known or {}), dict[str, str]()

    @classmethod
    def of_run(cls, folder: RunFolder, stored: StoredRun | None = None) -> PinnedVersions:
        """Return the versions of an earlier start of a run or a pipeline; none if there was no earlier start.

        Args:
            folder: folder of the run.
            stored: copy of the run in storage.

        Raises:
            ConfigError: the file is damaged.
        """
        if folder.pinned_versions.is_file():
            return cls(_read(folder.pinned_versions.read_bytes(), str(folder.pinned_versions)))
        content = None if stored is None else stored.read(folder.pinned_versions.name)
        return cls() if content is None else cls(_read(content, f"{folder.pinned_versions.name} in run.storage"))

    def pin(self, option: str, name: HubName) -> HubName:
        """Return a name with its commit.

        Raises:
            ConfigError: the hub does not know the name, refuses, or does not answer.
        """
        key = f"{name.kind}s/{replace(name, revision=name.revision or 'main')}"
        if key not in self.known:
            self.known[key] = str(pin(name, option).revision)
        self.used[key] = self.known[key]
        return replace(name, revision=self.known[key])

    def pin_model(self, option: str, uri: str, store: str) -> str:
        """Return the URI of a model in MLflow that names the same model for ever.

        Raises:
            ConfigError: see `resolve_model`.
        """
        if uri not in self.known and (fixed := resolve_model(option, uri, store)) != uri:
            self.known[uri] = fixed
        return self.known.get(uri, uri)

    def write(self, file: Path) -> None:
        """Write the versions into a file, if there are any.

        Raises:
            StorageError: the file cannot be written.
        """
        if self.known:
            write_whole_text(file, json.dumps(self.known, indent=1) + "\n")


def _read(content: bytes, file: str) -> dict[str, str]:
    try:
        known = read_foreign_json(content)
    except ValueError:
        known = None
    if not isinstance(known, dict) or not all(
        isinstance(version, str) and (HubName("", version).is_pinned or is_fixed(version)) for version in known.values()
    ):
        raise ConfigError(
            f"{file} is damaged: it must name a commit or a version for each name; remove it to look them up again"
        )
    return known


def pinned_model(versions: PinnedVersions, option: str, path: str) -> str:
    """Return the path of a model with the commit, if the path is a name on the hub; else the path.

    Raises:
        ConfigError: see `PinnedVersions.pin`.
    """
    if path.startswith(SCHEME):
        raise ConfigError(
            f"{option}={path}: a model of the hub has no address: name it OWNER/NAME or OWNER/NAME@REVISION"
        )
    name = model_name(path)
    return path if name is None else str(versions.pin(option, name))
