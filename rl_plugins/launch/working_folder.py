"""What of a project a Ray job needs, as one zip file: what git knows or would take, and never what is heavy."""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePath

from rl_plugins.errors import ConfigError
from rl_plugins.tracking.provenance import GIT_STATE_FILE, git_state

NEVER_SENT = (
    ".git", "__pycache__", ".venv", "venv", "node_modules", "outputs", "multirun", "checkpoints", "checkpoint_*",
    "lightning_logs", "mlruns", "mlartifacts", "wandb", "*.safetensors", "*.ckpt", "*.pt", "*.bin", "*.gguf",
    "*.parquet", "*.arrow", "*.jsonl", "*.db",
)  # fmt: skip
"""Names of files and folders that stay here: data, results, checkpoints and environments."""

_GIT_TIMEOUT_S = 60
_LISTED = 10
# Zip files know no earlier time; one time for all makes the same files the same package, which is sent once.
_TIME = (1980, 1, 1, 0, 0, 0)


def files_to_send(root: Path, exclude: Sequence[str] = (), include: Sequence[str] = ()) -> dict[PurePath, Path]:
    """Path in the package to file: tracked by git or untracked and not ignored; all there are without a repository.

    Args:
        root: the project.
        exclude: patterns of names or of paths below `root` that are left out, besides `NEVER_SENT`.
        include: patterns of paths below `root` that are sent all the same.

    Raises:
        ConfigError: git fails, or lists no file; a link leads out of the project.
    """
    listed = _listed_by_git(root, include)
    known = set(_walk(root) if listed is None else listed)
    # An environment is known by this file, whatever its name.
    environments = {path.parent for path in known if path.name == "pyvenv.cfg"}
    chosen = {
        path
        for path in known
        if _matches(path, include)
        or (not _matches(path, (*NEVER_SENT, *exclude)) and environments.isdisjoint(path.parents))
    }
    files: dict[PurePath, Path] = {}
    for path in sorted(chosen):
        files |= dict(_resolved(root, path, chosen))
    return files


def zip_files(files: dict[PurePath, Path], root: Path, archive: Path, *, limit_mib: float) -> int:
    """Write the files, and what git says of the project, into `archive`; returns their bytes before packing.

    Raises:
        ConfigError: they are larger than `limit_mib`; lists what takes the room.
    """
    sizes = {path: file.stat().st_size for path, file in files.items()}
    total = sum(sizes.values())
    if total > limit_mib * 2**20:
        raise ConfigError(
            f"{root} would send {total / 2**20:.1f} MiB to the cluster, above --limit {limit_mib:g}. The largest:\n"
            f"{describe_largest(sizes)}\nLeave out what the job does not need (--exclude PATTERN, or .gitignore), put "
            "data where the cluster reads it, or raise --limit"
        )
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as package:
        for path, file in files.items():
            entry = zipfile.ZipInfo(path.as_posix(), _TIME)
            entry.external_attr = file.stat().st_mode << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            package.writestr(entry, file.read_bytes())
        if (state := git_state(root)) is not None:
            package.writestr(zipfile.ZipInfo(GIT_STATE_FILE, _TIME), json.dumps(state))
    return total


def describe_largest(sizes: dict[PurePath, int]) -> str:
    """The largest folders and files, a line each; a folder counts all that is below it."""
    totals: Counter[str] = Counter()
    for path, size in sizes.items():
        totals[path.as_posix()] += size
        for folder in list(path.parents)[:-1]:
            totals[f"{folder.as_posix()}/"] += size
    return "\n".join(f"  {size / 2**20:8.1f} MiB  {name}" for name, size in totals.most_common(_LISTED))


def _listed_by_git(root: Path, include: Sequence[str]) -> list[PurePath] | None:
    """Tracked files and untracked ones that are not ignored; ignored ones only if they are included by name.

    None without git or a repository.

    Raises:
        ConfigError: git fails, or lists no file: all files instead would bring those that it ignores, such as secrets.
    """
    known = _git_files(root, "--cached", "--others", "--exclude-standard")
    if known is None:
        return None
    if include:
        ignored = _git_files(root, "--others", "--ignored", "--exclude-standard") or []
        known += [path for path in ignored if _matches(path, include)]
    files = [path for path in known if os.path.lexists(root / path)]
    if not files:
        raise ConfigError(
            f"git lists no file of {root}: it is empty, or ignored by the repository that it lies in: name what is "
            "sent with --include PATTERN, make it a repository of its own with git init, or send another --folder"
        )
    return files


def _git_files(root: Path, *which: str) -> list[PurePath] | None:
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z", *which], cwd=root, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return None
    if listing.returncode:
        if not _in_repository(root):
            return None
        reason = " ".join(os.fsdecode(listing.stderr).split())
        raise ConfigError(
            f"git cannot list the files of {root} ({reason}): mend that, or send another --folder; without git's word "
            "files that are ignored would be sent, too"
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


def _matches(path: PurePath, patterns: Iterable[str]) -> bool:
    """Whether the path, a folder above it, or the name of either fits one of the patterns."""
    places = [path, *list(path.parents)[:-1]]
    return any(
        fnmatch(place.as_posix(), pattern.strip("/")) or fnmatch(place.name, pattern.rstrip("/"))
        for pattern in patterns
        for place in places
    )


def _resolved(root: Path, path: PurePath, chosen: set[PurePath]) -> Iterator[tuple[PurePath, Path]]:
    """The file, or what a link leads to; a link to a folder stands for the files that are sent from there."""
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
