"""Files of a repository of the Hugging Face hub on this machine: the needed files alone, and one download.

The process with the lock of a repository downloads, and the other processes of the machine wait.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.file_lock import FileLock
from rl_plugins.hub.names import HubName, explained, model_name, pin

_WEIGHTS = ("*.safetensors",)
_PICKLES = ("*.bin",)
_SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm")
"""Files of configuration and tokenizer."""
_FURTHER_TEMPLATES = "additional_chat_templates/*.jinja"
"""Chat templates beside the first, such as a template with tools."""
# Folders with other formats of the same model, and the weights of Mistral's own programs.
_LEFT_OUT = ("*/*", "consolidated*")
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of an adapter in the format of peft."""
_STALL_S = 300.0
_PAUSE_S = 0.2
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_commits_here: dict[HubName, HubName] = {}
"""Commits of names, looked up by this process."""


def model_folder(path: str, *, option: str | None = None, weights: bool = True, trust_remote_code: bool = False) -> str:
    """Return the local folder of a model, after a download by one process of this machine if files are missing.

    The download has the files of transformers alone: safetensors, configuration and tokenizer. Python files, and
    weights in pickles (`.bin`) if there are no others, are left out unless the code is trusted.

    Args:
        path: folder, or name on the hub. A folder is returned unchanged.
        option: option or argument with the path, for messages.
        weights: download the weights, too.
        trust_remote_code: run Python code of the model.

    Raises:
        ConfigError: the hub does not answer or refuses, or a file is missing in offline mode.
        DeadlineExceeded: another process of this machine downloads the model, and its download stands still.
    """
    name = _pinned(path, option)
    if name is None:
        return path
    settings = [*_SETTINGS, *(("*.py",) if trust_remote_code else ())]
    folder = download(name, settings, option)
    if any(Path(file).match(_FURTHER_TEMPLATES) for file in repository_files(name)):
        download(name, [_FURTHER_TEMPLATES], option, left_out=())
    if weights:
        folder = download(name, [*settings, *_patterns_of_weights(name, option, trust_remote_code)], option)
    return str(folder)


def adapter_folder(path: str, *, option: str | None = None) -> str:
    """Return the local folder of an adapter, after a download by one process of this machine if files are missing.

    Args:
        path: folder, or name on the hub. A folder is returned unchanged.
        option: option or argument with the path, for messages.

    Raises:
        ConfigError: see `model_folder`.
        DeadlineExceeded: see `model_folder`.
    """
    name = _pinned(path, option)
    return path if name is None else str(download(name, ADAPTER_FILES, option))


def _pinned(path: str, option: str | None) -> HubName | None:
    """Return the name of a path with its commit; None for a folder."""
    name = model_name(path)
    if name is None or name.is_pinned:
        return name
    # The model and the tokenizer of a process are of one commit.
    if name not in _commits_here:
        _commits_here[name] = pin(name, option)
    return _commits_here[name]


def check_hub_weights(path: str, *, option: str | None = None, trust_remote_code: bool = False) -> None:
    """Check by the list of files if a repository has weights, before a download of the weights.

    Args:
        path: name on the hub, whose configuration is downloaded.
        option: option or argument with the path, for messages.
        trust_remote_code: see `model_folder`.

    Raises:
        ConfigError: there are no weights, or the only weights are pickles and not trusted.
    """
    name = model_name(path)
    if name is not None:
        _patterns_of_weights(_commits_here.get(name, name), option, trust_remote_code)


def _patterns_of_weights(name: HubName, option: str | None, trust_remote_code: bool) -> Sequence[str]:
    files = [file for file in repository_files(name) if "/" not in file]
    # The cache does not have the list of a download by an older version of huggingface_hub.
    if not files or any(fnmatchcase(file, pattern) for file in files for pattern in _WEIGHTS):
        return _WEIGHTS
    if not any(fnmatchcase(file, pattern) for file in files for pattern in _PICKLES):
        others = ", ".join(sorted(file for file in files if not file.startswith("."))[:4]) or "nothing"
        raise ConfigError(
            f"{name.shown(option)}: the repository has no weights of transformers, such as model.safetensors (it has "
            f"{others}): name a repository with weights"
        )
    if not trust_remote_code:
        raise ConfigError(
            f"{name.shown(option)}: the repository has its weights in pickles (.bin), which may run code: name a "
            "repository or a revision with safetensors, or trust the files with model.trust_remote_code=true "
            "(commands: --trust-remote-code, Python: trust_remote_code=True)"
        )
    return _PICKLES


def repository_files(name: HubName) -> list[str]:
    """Return the paths of all files of a downloaded commit on the hub; nothing if the cache does not have the list."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(name.repository, repo_type=name.kind, revision=name.revision)
    except CachedRepoTreeNotFoundError:
        return []
    return [file.path for file in files]


def download(
    name: HubName, patterns: Sequence[str], option: str | None = None, left_out: Sequence[str] = _LEFT_OUT
) -> Path:
    """Return the folder with the files of a commit in the cache, after a download of the missing files.

    One process of this machine downloads, and the others wait.

    Args:
        name: name with a commit.
        patterns: patterns of the needed files.
        option: option or argument with the name, for messages.
        left_out: patterns of unneeded files.

    Raises:
        ConfigError: see `model_folder`; or the hub does not give the list of the files of a data set.
        DeadlineExceeded: see `model_folder`.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.file_download import repo_folder_name

    assert name.is_pinned
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name.repository, repo_type=name.kind)

    def fetch(*, local_files_only: bool) -> Path:
        snapshot = snapshot_download(
            name.repository,
            repo_type=name.kind,
            revision=name.revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(left_out),
            local_files_only=local_files_only,
        )
        return Path(snapshot)

    def cached() -> Path | None:
        # Without the list of all files, the library would take a part of the files for the whole.
        if repository_files(name):
            with suppress(LocalEntryNotFoundError):
                return fetch(local_files_only=True)
        return None

    with explained(name, option):
        if (snapshot := cached()) is not None:
            return snapshot
        with only_download(str(name), folder):
            # Another process may have downloaded meanwhile.
            snapshot = cached() or fetch(local_files_only=False)
            if name.kind == "dataset" and not repository_files(name):
                _refuse_part(name, option)
            return snapshot


def _refuse_part(name: HubName, option: str | None) -> NoReturn:
    """Refuse a folder that may have a part of the files. A model with a part of its files cannot be loaded anyway.

    The library returns such a folder if the hub did not give the list of all files.
    """
    from huggingface_hub import HfApi, constants

    # Raises the error that the library has left out, if the hub still has this error.
    next(iter(HfApi().list_repo_tree(name.repository, repo_type=name.kind, revision=name.revision)), None)
    raise ConfigError(
        f"{name.shown(option)}: the cache {constants.HF_HUB_CACHE} has no list of the repository's files, so files may "
        "be missing: try again, or set HF_HOME to a folder that can be written"
    )


# One download ----------------------------------------------------------------------------------------------------


@contextmanager
def only_download(name: str, folder: Path, stall_s: float = _STALL_S) -> Iterator[None]:
    """Hold the lock of a repository, so this process alone downloads. The lock ends with the process.

    Args:
        name: name of the repository, for messages.
        folder: folder of the repository in the cache of the hub.
        stall_s: longest wait in seconds while the folder does not grow.

    Raises:
        DeadlineExceeded: another process holds the lock, and the folder has not grown.
    """
    lock = _lock_file(folder.parent / ".locks" / folder.name / "rl_plugins.lock")
    if lock is None:
        yield
        return
    try:
        size, since = -1, time.monotonic()
        while not lock.take():
            if (now := _bytes(folder)) != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > stall_s:
                raise DeadlineExceeded(
                    f"this process waited for another process of this machine to download {name} from the hub, and for "
                    f"{stall_s:g} s {folder} has not grown beyond {size} bytes: end the other process, or correct its "
                    "network"
                )
            time.sleep(_PAUSE_S)
        yield
    finally:
        lock.close()


def _lock_file(file: Path) -> FileLock | None:
    """Return the lock, or None in a cache that this process can only read."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(file)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
        return None


def _bytes(folder: Path) -> int:
    """Return the bytes of the downloaded files, also of incomplete files."""
    total = 0
    for file in (folder / "blobs").glob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            # A complete download gets another name.
            continue
    return total
