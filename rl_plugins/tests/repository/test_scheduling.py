"""The distribution of integration tests among processes."""

from __future__ import annotations

import re
from pathlib import Path

from integration_tests.scheduling import resident_fixtures


def test_resident_fixtures_are_the_fixtures_imported_by_the_conftest_of_integration_tests(root: Path) -> None:
    text = (root / "integration_tests" / "conftest.py").read_text(encoding="utf-8")
    (imported,) = re.findall(r"^from integration_tests\.resident import \(.*?$(.*?)^\)", text, re.MULTILINE | re.DOTALL)
    names = {name for name in re.findall(r"\w+", imported) if not name.startswith("pytest_")}
    assert set(resident_fixtures()) == names and len(names) == 4
