"""Parquet file of samples, made in parts, so a killed process can continue.

The parts and the settings of the samples lie in the folder `<file>.parts` beside the file. A part gets its name when it
is complete; so does the file, which holds the settings in its metadata.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.errors import ConfigError
from rl_plugins.whole_file import storing, write_whole, write_whole_text

_KEY = b"rl_plugins.generation"
Settings = Mapping[str, Any]


class SampleFile:
    """A file of samples and its parts.

    Args:
        path: path of the file.
        num_parts: number of parts.
        settings: settings of the samples, JSON values.

    Example:
        samples = SampleFile(path, num_parts, settings)
        with samples.open():
            for number in samples.missing():
                samples.write_part(number, sample_part(number))
            samples.finish()
    """

    def __init__(self, path: Path, num_parts: int, settings: Settings) -> None:
        self.path, self._num_parts = path, num_parts
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._folder = path.with_name(f"{path.name}.parts")

    @contextmanager
    def open(self) -> Iterator[None]:
        """Lock the file for this process and write the settings.

        Raises:
            ConfigError: the file or its parts have other settings, the file was not made by `rl-plugins generate`, or
                another process has locked the file.
            StorageError: the folder of the parts cannot be written.
        """
        self.check()
        with storing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            opened = (self._folder / "lock").open("w")
        with opened as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.path}: another process is making it: wait for it, or end it") from None
            write_whole_text(self._settings_file, json.dumps(self._settings, indent=1))
            yield

    def check(self) -> None:
        """Compare the settings with the settings of an existing file, or of its parts.

        Raises:
            ConfigError: the settings differ; the message names the differences.
        """
        if self.path.exists():
            found, place = read_settings(self.path), self.path
        elif self._settings_file.is_file():
            found, place = json.loads(self._settings_file.read_text()), self._folder
        else:
            return
        differing = [
            f"{name} was {found.get(name)} and is now {self._settings.get(name)}"
            for name in sorted({*found, *self._settings})
            if found.get(name) != self._settings.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{place} was made with other settings: {'; '.join(differing)}. Restore the settings to continue, "
                f"choose another file, or remove {place}"
            )

    @property
    def complete(self) -> bool:
        """True if the file is complete."""
        return self.path.exists()

    def missing(self) -> list[int]:
        """Return the numbers of the missing parts."""
        return [number for number in range(self._num_parts) if not self._part(number).is_file()]

    def write_part(self, number: int, rows: pa.Table) -> None:
        """Write a part."""
        write_whole(self._part(number), lambda file: pq.write_table(rows, file))

    def finish(self) -> None:
        """Join the parts, one in memory at a time, and remove the parts."""

        def join(file: Path) -> None:
            schema = pq.read_schema(self._part(0)).with_metadata({_KEY: json.dumps(self._settings)})
            with pq.ParquetWriter(file, schema) as writer:
                for number in range(self._num_parts):
                    writer.write_table(pq.ParquetFile(self._part(number)).read().replace_schema_metadata(None))

        write_whole(self.path, join)
        shutil.rmtree(self._folder)

    @property
    def _settings_file(self) -> Path:
        return self._folder / "settings.json"

    def _part(self, number: int) -> Path:
        return self._folder / f"part_{number:05d}.parquet"


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings in the metadata of a file of samples.

    Raises:
        ConfigError: the file was not made by `rl-plugins generate`.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        metadata = {}
    if _KEY not in metadata:
        raise ConfigError(f"{path} was not made by `rl-plugins generate`: name another file")
    settings: dict[str, Any] = json.loads(metadata[_KEY])
    return settings
