"""Select the files of a project for a Ray job, and write a zip file of the selected files.

The selection contains files that git tracks and new files, except for files that git ignores, data, results,
checkpoints and environments. Files with secrets are never selected, unless each is named by its whole path.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePath

from rl_plugins.errors import ConfigError
from rl_plugins.redaction import SECRET_FILES
from rl_plugins.tracking.provenance import GIT_STATE_FILE, git_state

NEVER_SENT = (
    ".git", "__pycache__", ".venv", "venv", "node_modules", "outputs", "multirun", "checkpoints", "checkpoint_*",
    "lightning_logs", "mlruns", "mlartifacts", "wandb", "*.safetensors", "*.ckpt", "*.pt", "*.bin", "*.gguf",
    "*.parquet", "*.arrow", "*.jsonl", "*.db",
)  # fmt: skip
"""Patterns for the names of files and folders that are left out: data, results, checkpoints and environments."""

_ENVIRONMENT = {PurePath(name) for name in ("pyvenv.cfg", "bin", "include", "lib", "lib64", "share")}
"""Files and folders of a virtual environment."""
_GIT_TIMEOUT_S = 60
_TRACKED_OR_NEW = ("--cached", "--others", "--exclude-standard")
_PRIVATE_KEY = re.compile(rb"\s*(-----BEGIN [A-Z ]*PRIVATE KEY|PuTTY-User-Key-File)")
_KEY_HEADER_BYTES = 100
_NUM_LISTED = 10
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
"""Earliest time of the zip format. One time for all files makes equal packages of equal files, uploaded once."""


def files_to_send(
    root: Path, exclude: Sequence[str] = (), include: Sequence[str] = ()
) -> tuple[dict[PurePath, Path], list[str]]:
    """Select the files to send. Without git or a repository, all files, except for the patterns in `NEVER_SENT`.

    Args:
        root: folder of the project.
        exclude: patterns of names, or of paths below `root`, to leave out besides `NEVER_SENT`.
        include: patterns of paths below `root` to send even if git or `NEVER_SENT` excludes the path. A file with a
            secret needs its whole path here.

    Returns:
        Path in the package to file, and the paths that are left out only because the files have secrets.

    Raises:
        ConfigError: git fails, git lists no file, or a link leads out of the project.
    """
    listed = _listed_by_git(root, exclude, include)
    known = set(_walk(root) if listed is None else listed)
    # Every virtual environment contains this file, whatever the name of the folder.
    environments = {path.parent for path in known if path.name == "pyvenv.cfg"}
    if PurePath() in environments:
        # The project is in the folder of an environment.
        environments = (environments - {PurePath()}) | _ENVIRONMENT
    chosen = {
        path
        for path in known
        if _matches(path, include)
        or (not _matches(path, (*NEVER_SENT, *exclude)) and environments.isdisjoint({path, *path.parents}))
    }
    files: dict[PurePath, Path] = {}
    for path in sorted(chosen):
        files |= dict(_resolve_link(root, path, chosen))
    secrets = [path for path, file in files.items() if path.as_posix() not in include and _is_secret(root, path, file)]
    for path in secrets:
        del files[path]
    return files, [path.as_posix() for path in secrets]


def zip_files(files: Mapping[PurePath, Path], root: Path, archive: Path, *, limit_mib: float) -> int:
    """Write the files and the state of the git repository into a zip file.

    Args:
        files: path in the package to file, from `files_to_send`.
        root: folder of the project.
        archive: zip file to write.
        limit_mib: largest allowed size of all files before compression, in MiB.

    Returns:
        Size of all files before compression, in bytes.

    Raises:
        ConfigError: the files are larger than `limit_mib`. The message lists the largest files.
    """
    sizes = {path: file.stat().st_size for path, file in files.items()}
    total = sum(sizes.values())
    if total > limit_mib * 2**20:
        raise ConfigError(
            f"{root} would send {total / 2**20:.1f} MiB to the cluster, above --limit {limit_mib:g}. The largest: "
            f"{', '.join(describe_largest(sizes))}. Leave out files that the job does not need (--exclude PATTERN, or "
            ".gitignore), put data where the cluster reads it, or raise --limit"
        )
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as package:
        for path, file in files.items():
            entry = zipfile.ZipInfo(path.as_posix(), _ZIP_TIME)
            entry.external_attr = file.stat().st_mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            package.writestr(entry, file.read_bytes())
        if (state := git_state(root)) is not None:
            package.writestr(zipfile.ZipInfo(GIT_STATE_FILE, _ZIP_TIME), json.dumps(state))
    return total


def describe_largest(sizes: Mapping[PurePath, int]) -> list[str]:
    """Return a text for each of the largest files and folders. A folder has the size of all files below."""
    totals: Counter[str] = Counter()
    for path, size in sizes.items():
        totals[path.as_posix()] += size
        for folder in list(path.parents)[:-1]:
            totals[f"{folder.as_posix()}/"] += size
    return [f"{size / 2**20:.1f} MiB {name}" for name, size in totals.most_common(_NUM_LISTED)]


def _listed_by_git(root: Path, exclude: Sequence[str], include: Sequence[str]) -> list[PurePath] | None:
    """Return the tracked files, new files that git does not ignore, and ignored files that match `include`.

    The files of a submodule, or of another repository in the folder, are among them, unless the repository is left
    out. None without git or a repository.

    Raises:
        ConfigError: git fails or lists no file. Returning all files instead would send ignored files, such as
            secrets.
    """
    known = _git_files(root, *_TRACKED_OR_NEW)
    if known is None:
        return None
    left_out = (*NEVER_SENT, *exclude)
    paths = _of_repositories(root, PurePath(), known, left_out, include)
    files = [path for path in paths if os.path.lexists(root / path)]
    if not files:
        raise ConfigError(
            f"git lists no file of {root}: the folder is empty, or the repository around it ignores it: name the files "
            "with --include PATTERN, make the folder a repository of its own with git init, or send another --folder"
        )
    return files


def _of_repositories(
    root: Path, repository: PurePath, listed: Iterable[PurePath], left_out: Sequence[str], include: Sequence[str]
) -> Iterator[PurePath]:
    """Yield the files of a repository, and of the repositories in it: git lists the folder of a submodule.

    Args:
        root: folder of the project.
        repository: path of the repository below `root`.
        listed: tracked and new paths below the repository.
        left_out: patterns of paths below `root` to leave out.
        include: patterns of paths below `root` to yield even if git ignores the path or `left_out` matches the path.
    """
    is_ignored = {repository / path: False for path in listed}
    if include:
        ignored = _git_files(root / repository, "--others", "--ignored", "--exclude-standard") or []
        is_ignored |= {repository / path: True for path in ignored if _reaches(include, repository / path)}
    for path, needs_pattern in is_ignored.items():
        place = root / path
        if place.is_symlink() or not os.path.lexists(place / ".git"):
            yield path
        # git may refuse a repository of another user, whose files would not be sent.
        elif not _matches(path, left_out) or _reaches(include, path):
            nested = _git_files(place, *_TRACKED_OR_NEW) or ()
            files = _of_repositories(root, path, nested, left_out, include)
            yield from (file for file in files if not needs_pattern or _matches(file, include))


def _git_files(root: Path, *options: str) -> list[PurePath] | None:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", *options], cwd=root, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return None
    if listing.returncode:
        if not _in_repository(root):
            return None
        reason = " ".join(os.fsdecode(listing.stderr).split())
        raise ConfigError(
            f"git cannot list the files of {root} ({reason}): correct that, or send another --folder; without git, "
            "ignored files would be sent, too"
        )
    return [PurePath(os.fsdecode(name)) for name in listing.stdout.split(b"\0") if name]


def _in_repository(root: Path) -> bool:
    folder = root.resolve()
    return any(os.path.lexists(place / ".git") for place in (folder, *folder.parents))


def _walk(root: Path) -> Iterator[PurePath]:
    for folder, folders, files in os.walk(root):
        below = PurePath(folder).relative_to(root)
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        yield from (below / name for name in (*files, *links))


def _is_secret(root: Path, path: PurePath, file: Path) -> bool:
    """Return True for a private key, and for a file whose name, or a folder above it, is in `SECRET_FILES`.

    Args:
        root: folder of the project.
        path: path in the package.
        file: file of the path. A link has another name than its file.
    """
    names = {*path.parts, *file.resolve().relative_to(root.resolve()).parts}
    if any(fnmatch(name.lower(), pattern) for name in names for pattern in SECRET_FILES):
        return True
    with file.open("rb") as content:
        return _PRIVATE_KEY.match(content.read(_KEY_HEADER_BYTES)) is not None


def _matches(path: PurePath, patterns: Iterable[str]) -> bool:
    """Return True if a pattern matches the path, a folder above it, or the name of either."""
    places = [path, *list(path.parents)[:-1]]
    return any(
        fnmatch(place.as_posix(), pattern.strip("/")) or fnmatch(place.name, pattern.rstrip("/"))
        for pattern in patterns
        for place in places
    )


def _reaches(patterns: Iterable[str], path: PurePath) -> bool:
    """Return True if a pattern matches a path, or begins with the path of a folder."""
    return _matches(path, patterns) or any(pattern.startswith(f"{path.as_posix()}/") for pattern in patterns)


def _resolve_link(root: Path, path: PurePath, chosen: set[PurePath]) -> Iterator[tuple[PurePath, Path]]:
    """Yield path in the package and file. A link yields its target; a link to a folder, all chosen files in it."""
    place = root / path
    if not place.is_symlink():
        if place.is_file():
            yield path, place
        return
    target = place.resolve()
    if not target.is_relative_to(root.resolve()):
        raise ConfigError(f"{place} leads out of the project, to {target}: leave it out with --exclude '{path}'")
    if target.is_file():
        yield path, target
    elif target.is_dir():
        below = target.relative_to(root.resolve())
        for other in sorted(chosen):
            if other.is_relative_to(below) and (root / other).is_file():
                yield path / other.relative_to(below), root / other
