"""Files that harm: code in a pickle, changed bytes, a full disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.manifest import CheckpointWriter, write_manifest


@dataclass
class Command:
    """Object whose pickle runs a command of the shell."""

    line: str

    def __reduce__(self) -> Any:
        return os.system, (self.line,)


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """Let every write beyond a size in bytes fail, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def flip_byte(file: Path, position: int | None = None) -> None:
    """Change one byte of a file, in its middle by default, in place."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 0xFF
    file.unlink()
    file.write_bytes(content)


def rewrite_manifest(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint for its present files."""
    writer = CheckpointWriter(checkpoint)
    writer.add_others({})
    write_manifest(checkpoint, writer.files)
