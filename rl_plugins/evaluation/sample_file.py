"""A parquet file that comes into being in parts, so that a killed process goes on where it was.

Parts lie in the folder `<file>.parts` beside it, with the settings they were made by. A part has its name only when it
is complete, and so has the file, which holds the settings in its metadata.
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
from rl_plugins.whole_file import write_whole, write_whole_text

_KEY = b"rl_plugins.generation"
Settings = Mapping[str, Any]


class SampleFile:
    """A file of samples and its parts.

    Args:
        path: of the file.
        num_parts: how many parts it has.
        settings: what the samples depend on; plain values.
    """

    def __init__(self, path: Path, num_parts: int, settings: Settings) -> None:
        self.path, self._num_parts = path, num_parts
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._folder = path.with_name(f"{path.name}.parts")

    @contextmanager
    def open(self) -> Iterator[None]:
        """Take the file for this process.

        Raises:
            ConfigError: the file or its parts were made with other settings, by something else, or are being made by
                another process.
        """
        self.check()
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{self.path}: another process is making it: wait for it, or end it") from None
            write_whole_text(self._settings_file, json.dumps(self._settings, indent=1))
            yield

    def check(self) -> None:
        """Compare the settings with those of the file, or of its parts, if there is one.

        Raises:
            ConfigError: names what differs.
        """
        if self.path.exists():
            begun, where = read_settings(self.path), self.path
        elif self._settings_file.is_file():
            begun, where = json.loads(self._settings_file.read_text()), self._folder
        else:
            return
        differing = [
            f"{name} was {begun.get(name)} and is now {self._settings.get(name)}"
            for name in sorted({*begun, *self._settings})
            if begun.get(name) != self._settings.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{where} was made with other settings: {'; '.join(differing)}. Restore them to go on, choose another "
                "file, or remove this one"
            )

    @property
    def complete(self) -> bool:
        """Whether the file is there."""
        return self.path.exists()

    def missing(self) -> list[int]:
        """Numbers of the parts that are not there yet."""
        return [number for number in range(self._num_parts) if not self._part(number).is_file()]

    def write_part(self, number: int, rows: pa.Table) -> None:
        """Write a part."""
        write_whole(self._part(number), lambda file: pq.write_table(rows, file))

    def finish(self) -> None:
        """Join the parts, one at a time, and remove them."""

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
    """The settings that a file of samples was made by.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (pa.ArrowInvalid, OSError):
        metadata = {}
    if _KEY not in metadata:
        raise ConfigError(f"{path} was not made by `rl-plugins generate`: name another file")
    settings: dict[str, Any] = json.loads(metadata[_KEY])
    return settings
