"""Folders and files at an address, on object storage or a shared file system, through `pyarrow.fs`.

An address is `s3://BUCKET/FOLDER`, `gs://`, `abfs://`, `hdfs://`, `file://`, `fsspec+PROTOCOL://`, or a folder. pyarrow
takes credentials from the environment and from the files of each cloud's own tools.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote

from rl_plugins.errors import ConfigError, StorageError
from rl_plugins.owned_folder import owned_in_context
from rl_plugins.redaction import redacted, without_password

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://")
_AS_PATH = re.compile(r"([a-z][a-z0-9+.-]+):/+")
"""Address, also after `pathlib.Path`, which leaves one slash of two."""
_PART_BYTES = 2**24
_STREAMS = 8
"""Files that are fetched at the same time."""
_DIGEST_LENGTH = 8


def is_address(path: str) -> bool:
    """Return True for an address such as `s3://bucket/folder`, and False for a path."""
    return _ADDRESS.match(path) is not None


def local_path(name: str, path: str | Path) -> Path:
    """Return the path of a local file or folder.

    Args:
        name: name of the option or the argument, for the message.
        path: path to check.

    Raises:
        ConfigError: the path is an address. As a path, the address would be a local folder with the name `s3:`.
    """
    if _AS_PATH.match(str(path)) is not None:
        shown = without_password(_AS_PATH.sub(r"\1://", str(path), count=1)).partition("?")[0]
        raise ConfigError(
            f"{name}={shown}: an address cannot be used here: give a local path; run.storage of a recipe copies a run "
            "to an address"
        )
    return Path(path)


def folder_in(address: str, name: str) -> str:
    """Return the address of a folder inside an address. Options of the address (`?region=...`) stay at its end."""
    if not is_address(address):
        return str(Path(address) / name)
    place, mark, options = address.partition("?")
    return f"{place.rstrip('/')}/{quote(name, safe='')}{mark}{options}"


@dataclass(frozen=True)
class Storage:
    """A file or a folder at an address.

    A StorageError of a method says that the storage did not answer, or refused.

    Attributes:
        shown: address without secrets, for messages.
    """

    shown: str
    _files: FileSystem
    _path: str

    @classmethod
    def at(cls, option: str, address: str) -> Storage:
        """Open an address.

        Args:
            option: name of the option with the address, for the message.
            address: address, or the absolute path of a folder.

        Raises:
            ConfigError: pyarrow does not know the address, or cannot connect.
        """
        from pyarrow import ArrowException
        from pyarrow.fs import FileSystem

        shown = without_password(address).partition("?")[0]
        try:
            files, path = FileSystem.from_uri(address)
        except (OSError, ValueError, ImportError, ArrowException) as error:
            raise ConfigError(f"{option}={shown}: pyarrow does not open this address ({_reason(error)})") from None
        return cls(shown, files, path.rstrip("/"))

    @property
    def name(self) -> str:
        """Name of the file or the folder, without characters of an address such as `%20`."""
        return PurePosixPath(self._path).name

    @property
    def local(self) -> Path | None:
        """Path on this machine; None for an address of another file system."""
        return Path(self._path) if self._files.type_name == "local" else None

    def inside(self, name: str) -> Storage:
        """Return a file or a folder inside this folder."""
        return Storage(f"{self.shown.rstrip('/')}/{name}", self._files, self._full(name))

    def files(self) -> dict[str, FileInfo]:
        """Return size and time of each file, by its path in the folder. The path of a single file is empty."""
        from pyarrow.fs import FileSelector

        with self._answering("cannot be read"):
            found = self._files.get_file_info([self._path])
            if not found[0].is_file:
                found = self._files.get_file_info(FileSelector(self._path, allow_not_found=True, recursive=True))
        names = {info.path[len(self._path) :].lstrip("/"): info for info in found if info.is_file}
        # A key of object storage may have a name that leads out of a folder.
        return {name: info for name, info in names.items() if ".." not in PurePosixPath(name).parts}

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._answering(f"does not give {name}"), self._files.open_input_stream(self._full(name)) as file:
            content: bytes = file.read()
        return content

    def send(self, file: BinaryIO, name: str, on_part: Callable[[], None] = lambda: None) -> None:
        """Write a file. A reader sees the earlier file until the new one is complete.

        Args:
            file: local file, open for reading.
            name: path in the folder.
            on_part: called after each part of the file.
        """
        path = PurePosixPath(self._full(name))
        # Object storage shows an object when it is complete, and has no folders.
        is_local = self._files.type_name == "local"
        new = path.with_name(f".{path.name}.partial") if is_local else path
        with self._answering(f"does not take {name}"):
            try:
                stream = self._files.open_output_stream(str(new))
            except FileNotFoundError:
                # A file system has folders; object storage has none, and a new folder there may be a new bucket.
                self._files.create_dir(str(path.parent), recursive=True)
                stream = self._files.open_output_stream(str(new))
            with stream:
                while part := file.read(_PART_BYTES):
                    stream.write(part)
                    on_part()
            if new != path:
                self._files.move(str(new), str(path))

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copy files into a local folder, several at a time, with their times. The name of a single file is empty."""
        from pyarrow.fs import LocalFileSystem, copy_files

        def fetch_one(name: str) -> None:
            target = folder / (name or self.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._answering(f"does not give {name}"):
                copy_files(
                    self._full(name), str(target), source_filesystem=self._files,
                    destination_filesystem=LocalFileSystem(), chunk_size=_PART_BYTES,
                )  # fmt: skip
                time_ns = self._files.get_file_info(self._full(name)).mtime_ns
            if time_ns is not None:
                os.utime(target, ns=(time_ns, time_ns))

        with ThreadPoolExecutor(_STREAMS) as pool:
            list(pool.map(fetch_one, names))

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        with self._answering(f"does not remove {name}"), suppress(FileNotFoundError):
            self._files.delete_file(self._full(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder with all its files, if there is one."""
        with self._answering(f"does not remove {name}"), suppress(FileNotFoundError):
            self._files.delete_dir(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")

    @contextmanager
    def _answering(self, problem: str) -> Iterator[None]:
        """Turn an error of the storage inside this context into one line."""
        from pyarrow import ArrowException

        try:
            yield
        except (OSError, ArrowException) as error:
            raise StorageError(f"{self.shown} {problem} ({_reason(error)})") from error


def fetch_copy(option: str, address: str, cache: Path) -> Path:
    """Return a local copy of a file or a folder; copy the files that the cache lacks, or that have changed.

    Args:
        option: name of the option with the address, for messages.
        address: address of the file or the folder.
        cache: parent folder of the copies.

    Raises:
        ConfigError: there is no such file or folder, or the storage does not give it.
    """
    storage = Storage.at(option, address)
    try:
        files = storage.files()
        if not files:
            raise ConfigError(f"{option}={storage.shown}: there is no such file or folder")
        state = sorted((name, info.size, info.mtime_ns) for name, info in files.items())
        digest = sha256(f"{storage.shown} {state}".encode()).hexdigest()[:_DIGEST_LENGTH]
        copy = cache / f"{storage.name}-{digest}"
        if not copy.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with owned_in_context(f".{storage.name}.", cache) as partial:
                # The temporary folder itself can be read by its user only.
                new = partial / "copy"
                storage.fetch(files, new)
                try:
                    new.replace(copy)
                except OSError:
                    # Another run has finished the same copy first.
                    if not copy.is_dir():
                        raise
    except (StorageError, OSError) as error:
        raise ConfigError(f"{option}={storage.shown}: {error}") from None
    return copy / storage.name if "" in files else copy


def _reason(error: BaseException) -> str:
    return " ".join(redacted(str(error)).split())[:300] or type(error).__name__
