"""The folder of a run, shared by the tests of the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_plugins.run_folder import RunFolder
from rl_plugins.tests.report.handmade_run import handmade_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return handmade_run(tmp_path / "grpo")
