"""The documentation site builds without a warning, links lead somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rl_plugins


@pytest.fixture(scope="module")
def site(root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    outcome = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert outcome.returncode == 0, outcome.stderr
    return folder


def test_every_page_is_there(root, site):
    pages = {path.relative_to(root / "docs") for path in (root / "docs").rglob("*.md")}
    expected = {
        path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html") for path in pages
    }
    assert {path for path in expected if not (site / path).is_file()} == set()
    assert (site / "repository/examples/own_algorithm/own_algorithm.py.html").is_file()


def test_nothing_is_loaded_from_elsewhere(site):
    loading = r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+"""
    for page in site.rglob("*.html"):
        found = [tag for tag in re.findall(loading, page.read_text(encoding="utf-8")) if 'rel="canonical"' not in tag]
        assert found == [], page


def test_the_api_page_has_every_name_of_the_package(root, site):
    text = (site / "api.html").read_text(encoding="utf-8")
    for name, module in rl_plugins._MODULES.items():
        assert f'id="rl_plugins.{module}.{name}"' in text, name


def test_links_of_the_readme_lead_somewhere(root):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", (root / "README.md").read_text(encoding="utf-8")):
        assert (root / link).exists(), link


def test_a_link_to_a_missing_file_is_refused(root):
    code = "import linked_files; linked_files._target('docs/index.md', '../examples/nowhere')"
    command = [sys.executable, "-c", code]
    outcome = subprocess.run(command, cwd=root / "docs", capture_output=True, text=True)
    assert outcome.returncode == 1
    assert "docs/index.md links to ../examples/nowhere, and there is no examples/nowhere" in outcome.stderr
