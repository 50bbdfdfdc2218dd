"""Names on the Hugging Face hub: the commit of a name, and the files of the commit on this machine.

A name is `OWNER/NAME` or `OWNER/NAME@REVISION`. The process that starts a run asks the hub for the commit once, and
hands on `OWNER/NAME@COMMIT`, so that all machines and a resumed run read the same files. A local folder comes before a
name.

Requests, cache, token (HF_TOKEN), offline mode (HF_HUB_OFFLINE) and progress bars are those of huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.hub_download import only_download

_TIMEOUT_S = 5.0
_REPOSITORY = r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*"
_REVISION = r"[\w.-]+(?:/[\w.-]+)*"
_NAME = re.compile(rf"({_REPOSITORY})(?:@({_REVISION}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WEIGHTS = ("*.safetensors",)
_PICKLES = ("*.bin",)
_SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.spm")
"""Files of configuration and tokenizer."""
_NO_FOLDER = {"model": "there is no such folder here, and ", "dataset": ""}
"""Beginning of a refusal: a path of a model without a folder is a name on the hub."""
# Folders with other formats of the same model, and the weights of Mistral's own programs.
_LEFT_OUT = ("*/*", "consolidated*")


@dataclass(frozen=True)
class HubName:
    """Name of a repository on the hub.

    Attributes:
        repository: owner and name.
        revision: branch, tag or commit; None is the main branch.
        kind: kind of the repository.
    """

    repository: str
    revision: str | None = None
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        """Return the name as an option takes it."""
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def shown(self, option: str | None) -> str:
        """Return the name behind its option, for messages."""
        shown = f"hf://datasets/{self}" if self.kind == "dataset" else str(self)
        return shown if option is None else f"{option}={shown}"


def model_name(path: str) -> HubName | None:
    """Return the name on the hub; None for a local folder, and for text that is no name."""
    found = None if Path(path).is_dir() else _NAME.fullmatch(path)
    return None if found is None else HubName(found[1], found[2])


def pin(name: HubName, option: str | None = None) -> HubName:
    """Return the name with the commit of its revision. A commit is returned unchanged, without a request.

    In offline mode the commit is the one of the last download.

    Args:
        name: name of a repository.
        option: option or argument with the name, for messages.

    Raises:
        ConfigError: the hub does not answer or refuses, or there is no such repository or revision.
    """
    if name.is_pinned:
        return name
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.errors import RevisionResolutionError

    with explained(name, option):
        if not is_offline_mode():
            # Without this request, the library would silently take the commit of an earlier download from the cache
            # if the hub does not answer.
            HfApi().repo_info(name.repository, repo_type=name.kind, revision=name.revision, timeout=_TIMEOUT_S)
        try:
            found = HfApi().resolve_revision(name.repository, repo_type=name.kind, revision=name.revision)
        except RevisionResolutionError:
            raise ConfigError(f"{name.shown(option)}: {_not_in_cache(name)}") from None
    return replace(name, revision=found.resolved)


_commits_here: dict[HubName, HubName] = {}
"""Commit of each name that this process has looked up."""

# Files ------------------------------------------------------------------------------------------------------------


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
    name = model_name(path)
    if name is None:
        return path
    if not name.is_pinned:
        # The model and the tokenizer of a process are of one commit.
        if name not in _commits_here:
            _commits_here[name] = pin(name, option)
        name = _commits_here[name]
    settings = [*_SETTINGS, *(("*.py",) if trust_remote_code else ())]
    folder = download(name, settings, option)
    if weights:
        folder = download(name, [*settings, *_patterns_of_weights(name, option, trust_remote_code)], option)
    return str(folder)


def check_hub_weights(path: str, *, option: str | None = None, trust_remote_code: bool = False) -> None:
    """Check by the list of files that a repository has weights, before a download of the weights.

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
        left_out: patterns of files that are not needed.

    Raises:
        ConfigError: see `model_folder`.
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
            return cached() or fetch(local_files_only=False)


# Errors -----------------------------------------------------------------------------------------------------------


@contextmanager
def explained(name: HubName, option: str | None, right: str = "read") -> Iterator[None]:
    """Turn an error of huggingface_hub inside this context into one line with the reason and the way out.

    Args:
        name: name of the repository.
        option: option or argument with the name.
        right: needed right of the token.

    Raises:
        ConfigError: the context raised an error of the hub, of the network or of the cache's files.
    """
    import httpx2
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    # A DeadlineExceeded is an OSError, too.
    except (ConfigError, DeadlineExceeded):
        raise
    except HFValidationError as error:
        raise ConfigError(f"{name.shown(option)}: not a name of the hub ({_first_line(error)}): correct it") from None
    except (httpx2.HTTPError, EntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(f"{name.shown(option)}: {_reason(name, error, right)}") from None


def _reason(name: HubName, error: Exception, right: str) -> str:
    """Return the reason of a failure of the hub, and the way out."""
    import httpx2
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        # The library has looked into the cache after the failure of a request.
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError):
        return _not_in_cache(name)
    has_token, hub = get_token() is not None, constants.ENDPOINT
    if isinstance(error, GatedRepoError):
        return (
            f"the repository is gated, and {'the token may not read it' if has_token else 'there is no token'}: accept "
            f"its conditions at {hub}/{name.repository}, and set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision {name.revision or 'main'!r}: correct the name behind the @"
    if isinstance(error, RepositoryNotFoundError):
        private = "the token may not read it" if has_token else "it is private and there is no token (HF_TOKEN)"
        return (
            f"{_NO_FOLDER[name.kind]}{hub} has no such repository, or {private}: correct the name, or set HF_TOKEN to "
            "a token that may read the repository"
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        if status in (401, 403):
            return f"{hub} refuses the token (status {status}): set HF_TOKEN to a token that may {right} the repository"
        if status == 429:
            return f"{hub} has had too many requests (status 429): set HF_TOKEN, or try again later"
    if isinstance(error, httpx2.HTTPError | ConnectionError | TimeoutError):
        return (
            f"{hub} does not answer ({_first_line(error)}): try again later, correct HF_ENDPOINT, or set "
            "HF_HUB_OFFLINE=1 to use the files of an earlier download"
        )
    return f"the cache {constants.HF_HUB_CACHE} cannot be written ({_first_line(error)}): set HF_HOME to another folder"


def _not_in_cache(name: HubName) -> str:
    from huggingface_hub import constants

    kind = " --repo-type dataset" if name.kind == "dataset" else ""
    revision = f" --revision {name.revision}" if name.revision else ""
    return (
        f"{_NO_FOLDER[name.kind]}HF_HUB_OFFLINE forbids requests, and the cache {constants.HF_HUB_CACHE} does not have "
        f"the files: run `hf download {name.repository}{kind}{revision}` with a network, or unset HF_HUB_OFFLINE"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].partition(". ")[0].rstrip(".:") if lines else type(error).__name__
