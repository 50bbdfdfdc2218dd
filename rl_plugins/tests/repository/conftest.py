from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the checkout."""
    folder = Path(__file__).parents[3]
    assert (folder / "pyproject.toml").is_file()
    return folder
