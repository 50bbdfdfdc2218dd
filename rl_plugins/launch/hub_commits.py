"""Models and data sets of the Hugging Face hub in the options of a run: a commit for each, kept in the run's folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import unquote

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError, StorageError
from rl_plugins.hub import HubName, download, model_name, pin, repository_files
from rl_plugins.launch.stored_run import StoredRun
from rl_plugins.run_folder import RunFolder
from rl_plugins.whole_file import link_or_copy, write_whole_text

_SCHEME = "hf://"
_DATA = re.compile(
    r"hf://datasets/(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[\w.-]+|[\w.%-]+))?/(?P<path>[^?#]+)",
    re.ASCII,
)
_SHOWN_FILES = 4
_DIGITS = 12


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
        commits = json.loads(content)
    # Very deep JSON is a RecursionError.
    except (ValueError, RecursionError):
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
    if path.startswith(_SCHEME):
        raise ConfigError(
            f"{option}={path}: a model of the hub has no address: name it OWNER/NAME or OWNER/NAME@REVISION"
        )
    name = model_name(path)
    return path if name is None else str(commits.pin(option, name))


def fetch_weights(config: RecipeConfig) -> None:
    """Download the weights of the models of the hub to this machine, and check them.

    Raises:
        ConfigError: the hub does not give a file, or the files do not fit each other.
    """
    from rl_plugins.models.folder import check_model_folder

    for option, path in config.model_paths.items():
        if model_name(path) is not None:
            check_model_folder(option, path, trust_remote_code=config.model.trust_remote_code)


def is_data_address(path: str) -> bool:
    """Return True for an address on the hub."""
    return path.startswith(_SCHEME)


def fetch_data_files(commits: HubCommits, option: str, address: str, cache: Path) -> list[str]:
    """Return local copies of the files at an address on the hub, in a folder that all machines of the run see.

    Args:
        commits: commits of the run.
        option: option with the address.
        address: `hf://datasets/OWNER/NAME[@REVISION]/PATH`. The path is a file, a folder with parquet files, or a
            pattern with `*`.
        cache: parent folder of the copies.

    Raises:
        ConfigError: the address is malformed, the hub does not give the files, there is no such file, or a file is not
            parquet.
    """
    parts = _DATA.fullmatch(address)
    if parts is None:
        raise ConfigError(
            f"{option}={address}: must be hf://datasets/OWNER/NAME/PATH or hf://datasets/OWNER/NAME@REVISION/PATH; the "
            "path is a parquet file, a folder with parquet files, or a pattern such as data/train-*.parquet"
        )
    revision, path = parts["revision"], parts["path"].strip("/")
    asked = HubName(parts["repository"], revision and unquote(revision), "dataset")
    name = commits.pin(option, asked)
    patterns = [path, f"{path}/*.parquet"]
    snapshot = download(name, patterns, option, left_out=())
    files = sorted(
        relative
        for file in snapshot.rglob("*")
        if file.is_file() and _is_meant(relative := file.relative_to(snapshot).as_posix(), patterns)
    )
    if not files:
        others = [file for file in repository_files(name) if not file.startswith(".")]
        raise ConfigError(f"{option}={address}: the repository has no such file{_some(others)}: correct the path")
    for file in files:
        if not file.endswith(".parquet"):
            raise ConfigError(
                f"{option}={address}: {file} is not a parquet file: convert it with `rl-plugins prepare`, or name the "
                f"hub's own conversion, hf://datasets/{asked.repository}@refs/convert/parquet/..."
            )
    copies = cache / f"{name.repository.replace('/', '--')}-{str(name.revision)[:_DIGITS]}"
    return [str(_copied(snapshot / file, copies / file)) for file in files]


def _is_meant(file: str, patterns: Sequence[str]) -> bool:
    return file == patterns[0] or any(fnmatchcase(file, pattern) for pattern in patterns)


def _some(files: Sequence[str]) -> str:
    parquet = [file for file in files if file.endswith(".parquet")] or list(files)
    more = ", ..." if len(parquet) > _SHOWN_FILES else ""
    return f" (it has {', '.join(parquet[:_SHOWN_FILES])}{more})" if parquet else ""


def _copied(file: Path, copy: Path) -> Path:
    """Give a file of the cache a name in another folder. A copy that exists is of the same commit."""
    if copy.is_file():
        return copy
    partial = copy.with_name(f".{copy.name}.partial")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        link_or_copy(file.resolve(), partial)
        partial.replace(copy)
    except OSError as error:
        raise StorageError(f"{copy} cannot be written ({error.strerror}): choose another run.output_dir") from None
    return copy
