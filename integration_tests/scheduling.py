"""Shares the files of tests among the processes of pytest-xdist. All files with the resident Ray share one process."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from typing_extensions import override
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parent.parent
RESIDENT = re.compile(r"\b(running_ray|float32_engine|bfloat16_engine|adapter_engine)\b")
"""Fixtures of `resident`."""


class FileScheduling(LoadFileScheduling):
    """Gives each process whole files, as `--dist loadfile` does, and Ray and the resident engines start once."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "resident" if _uses_resident_ray(file) else file


@cache
def _uses_resident_ray(file: str) -> bool:
    return file.startswith("integration_tests/") and RESIDENT.search((ROOT / file).read_text()) is not None
