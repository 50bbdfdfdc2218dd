"""Files written completely or not at all, also if the process is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a temporary file beside `path`, then rename the file to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, like `write_whole`."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))
