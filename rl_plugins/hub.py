"""Names on the Hugging Face hub: the commit of a name, and one line for a refusal of the hub.

A name is `OWNER/NAME` or `OWNER/NAME@REVISION`. The process that starts a run asks the hub for the commit once, and
hands on `OWNER/NAME@COMMIT`, so that all machines and a resumed run read the same files. A local folder comes before a
name.

Requests, cache, token (HF_TOKEN), offline mode (HF_HUB_OFFLINE) and progress bars are those of huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rl_plugins.errors import ConfigError, DeadlineExceeded

_TIMEOUT_S = 5.0
_REPOSITORY = r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*"
_REVISION = r"[\w.-]+(?:/[\w.-]+)*"
_NAME = re.compile(rf"({_REPOSITORY})(?:@({_REVISION}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_FOLDER = {"model": "there is no such folder here, and ", "dataset": ""}
"""Beginning of a refusal: a path of a model without a folder is a name on the hub."""


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
