"""What identifies a data file: its name, its rows, and a digest of its content."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

DIGEST_LENGTH = 32
"""Characters of SHA-256 in hexadecimal that are kept; MLflow takes 36."""


@dataclass(frozen=True)
class DataFile:
    """A data file as a tracking store keeps it.

    Attributes:
        name: of the file and its folder.
        digest: of its content.
        source: where it is, as JSON.
        profile: its rows and columns, as JSON.
    """

    name: str
    digest: str
    source: str
    profile: str


def describe_file(path: Path) -> DataFile:
    """Read a file for its digest; one that has not changed is read once."""
    status = path.stat()
    return _describe(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _describe(path: Path, size: int, mtime_ns: int) -> DataFile:
    profile: dict[str, Any] = {"bytes": size}
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        metadata = pq.read_metadata(path)
        profile |= {"rows": metadata.num_rows, "columns": metadata.schema.to_arrow_schema().names}
    return DataFile(
        name=f"{path.parent.name}/{path.name}",
        digest=digest_of(path),
        source=json.dumps({"uri": str(path)}),
        profile=json.dumps(profile),
    )


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content, shortened."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_LENGTH]
