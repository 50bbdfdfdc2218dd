"""Shares the files of tests among the processes of pytest-xdist. All files with the resident Ray share one process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from typing_extensions import override
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from rl_plugins.tests.time_limits import ALLOWED, LIMITS_S

ROOT = Path(__file__).parent.parent
RESIDENT = "resident"
"""Name of all files with the resident Ray."""


class FileScheduling(LoadFileScheduling):
    """Gives each process whole files, as `--dist loadfile` does, and Ray and the resident engines start once."""

    @override
    def _assign_work_unit(self, node: WorkerController) -> None:
        """Begin with integration tests, and with the longest files: at the end, short files keep all processes busy."""
        first = max(self.workqueue, key=lambda scope: (_is_integration(scope), _limit_s(self.workqueue[scope])))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)

    @override
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return RESIDENT if _uses_resident_ray(file) else file


def _is_integration(scope: str) -> bool:
    return scope == RESIDENT or scope.startswith("integration_tests/")


@cache
def _uses_resident_ray(file: str) -> bool:
    if not _is_integration(file):
        return False
    return re.search(rf"\b({'|'.join(resident_fixtures())})\b", (ROOT / file).read_text()) is not None


@cache
def resident_fixtures() -> list[str]:
    """Return the names of the fixtures of `resident`, without its imports of Ray and torch."""
    tree = ast.parse((ROOT / "integration_tests" / "resident.py").read_text())
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("pytest.fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def _limit_s(tests: Iterable[str]) -> float:
    """Return the sum of the limits of tests."""
    return sum(
        ALLOWED[test][0] if test in ALLOWED else LIMITS_S["integration" if _is_integration(test) else "unit"]
        for test in tests
    )
