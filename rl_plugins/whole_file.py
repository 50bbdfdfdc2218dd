"""Files that have their name only when they are complete, whenever a process is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` write a file beside `path`, and give it that name at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole_text(path: Path, text: str) -> None:
    """The same for a text, in UTF-8."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))
