"""Manifest of a checkpoint: size and digest of each file. The manifest is written last.

Each rank computes the digests of its own files while it writes the files. Before a resume, the ranks share the reading
of all files. A checkpoint without a manifest, or with other files than in its manifest, is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_plugins.errors import CheckpointError
from rl_plugins.plain_file import FileDigest, HashedFile, read_record, save_plain
from rl_plugins.whole_file import cannot_write, synchronize, write_whole_text

MANIFEST = "manifest.json"


class CheckpointWriter:
    """Files of one rank in the folder of a new checkpoint.

    A rank with a full disk must not leave the collective calls of the other ranks. So no method raises an OSError: the
    first error is in `failure`, and later files are not written.

    Args:
        folder: folder of the new checkpoint.

    Attributes:
        folder: folder of the new checkpoint.
        files: record of each written file, by its path in the folder.
        failure: first error, as a line for the user; None without an error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, FileDigest] = {}
        self.failure: str | None = None

    def make_folder(self, folder: Path) -> None:
        """Make a folder, and the folders above it."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.fail(folder, error)

    def save(self, value: object, path: Path, *, records: Sequence[type] = ()) -> None:
        """Write tensors and plain values; see `save_plain`."""
        if self.failure is None:
            try:
                self.files[self._name(path)] = save_plain(value, path, records=records)
            except OSError as error:
                self.fail(path, error)

    def save_text(self, text: str, path: Path) -> None:
        """Write a text in UTF-8."""
        if self.failure is None:
            with self.create(path) as file:
                file.write(text.encode())

    @contextmanager
    def create(self, path: Path) -> Iterator[Any]:
        """Give a new file to this context, and finish the file at the end of the context."""
        file = HashedFile(path)
        yield file
        try:
            self.files[self._name(path)] = file.finish()
        except OSError as error:
            self.fail(path, error)

    def rename(self, path: Path, new_path: Path) -> None:
        """Rename a finished file."""
        if self.failure is None:
            try:
                path.rename(new_path)
                self.files[self._name(new_path)] = self.files.pop(self._name(path))
            except OSError as error:
                self.fail(path, error)

    def add(self, path: Path) -> None:
        """Read a file of another library, and write its content to the disk."""
        if self.failure is None:
            try:
                synchronize(path)
                self.files[self._name(path)] = read_record(path)
            except OSError as error:
                self.fail(path, error)

    def add_folder(self, folder: Path) -> None:
        """Read all files of another library in a folder, and write their content to the disk."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.add(path)

    def add_others(self, known: Mapping[str, FileDigest]) -> None:
        """Add the files of the folder without a record in `known`."""
        for name in _file_names(self.folder):
            if name not in known and name not in self.files:
                self.add(self.folder / name)

    def fail(self, path: Path, error: OSError) -> None:
        """Record an error."""
        self.failure = self.failure or cannot_write(path, error)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()


def write_manifest(folder: Path, files: Mapping[str, FileDigest]) -> None:
    """Write the manifest of a checkpoint, and wait until the disk has the names of all files."""
    content = {"files": {name: asdict(files[name]) for name in sorted(files)}}
    write_whole_text(folder / MANIFEST, json.dumps(content, indent=1) + "\n")
    for inner in {folder, *((folder / name).parent for name in files)}:
        synchronize(inner)


def read_manifest(folder: Path) -> dict[str, FileDigest]:
    """Return the record of each file of a checkpoint, by its path in the folder.

    Raises:
        CheckpointError: the manifest is missing or damaged.
    """
    file = folder / MANIFEST
    try:
        return parse_manifest(file.read_text(encoding="utf-8"), file)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder} is not a complete checkpoint of this package: it has no {MANIFEST}") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is damaged: use another checkpoint") from None


def parse_manifest(text: str, file: Path) -> dict[str, FileDigest]:
    """Return the record of each file in the text of a manifest.

    Args:
        text: content of the manifest.
        file: path of the manifest, for the message.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    try:
        files = json.loads(text)["files"]
        return {str(name): FileDigest(int(kept["bytes"]), str(kept["digest"])) for name, kept in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file} is damaged: use another checkpoint") from None


def find_damage(folder: Path, *, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Compare the files of a checkpoint with the manifest; return the first damage, or None.

    The names and sizes of all files are compared, and the digests of every `num_ranks`-th file.

    Args:
        folder: folder of the checkpoint.
        rank: number of this process among the processes that share the reading.
        num_ranks: number of these processes.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    for name, kept in manifest.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None:
            return f"{folder / name} is missing"
        if size != kept.bytes:
            return f"{folder / name} has {size} bytes, and its manifest says {kept.bytes}"
    folders = {Path(name).parent for name in manifest}
    for name in _file_names(folder):
        if name not in manifest and Path(name).parent in folders:
            return f"{folder / name} is not a file of this checkpoint"
    by_size = sorted(manifest, key=lambda name: (-manifest[name].bytes, name))
    for name in by_size[rank::num_ranks]:
        try:
            if read_record(folder / name) != manifest[name]:
                return f"{folder / name} has another content than its manifest says"
        except OSError as error:
            return f"{folder / name} cannot be read ({error.strerror})"
    return None


def without(folder: Path, prefix: str) -> None:
    """Take the files below a subfolder out of the manifest of a checkpoint. The files are removed afterwards."""
    files = {name: kept for name, kept in read_manifest(folder).items() if not name.startswith(f"{prefix}/")}
    write_manifest(folder, files)


def _file_names(folder: Path) -> Iterator[str]:
    """Yield the path of each file in a folder, without the manifest, unfinished manifests and hidden folders."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        removed = any(part.startswith(".") and part.endswith(".removed") for part in name.parts)
        of_manifest = name.as_posix() == MANIFEST or name.as_posix().startswith(f".{MANIFEST}.")
        if path.is_file() and not of_manifest and not removed:
            yield name.as_posix()
