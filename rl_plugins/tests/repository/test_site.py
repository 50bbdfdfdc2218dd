"""The documentation site builds without a warning, links lead somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from mkdocs.exceptions import PluginError

import rl_plugins
from rl_plugins.tests.patience import patient
from rl_plugins.tests.repository.documentation import PAGES


@pytest.fixture(scope="module")
def site(root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    outcome = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=patient(120))
    assert outcome.returncode == 0, outcome.stderr
    return folder


@pytest.mark.extended
def test_site_has_a_page_for_every_file_of_docs(root, site):
    pages = {path.relative_to(root / "docs") for path in (root / "docs").rglob("*.md")}
    expected = {
        path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html") for path in pages
    }
    assert {path for path in expected if not (site / path).is_file()} == set()
    assert (site / "repository/examples/own_algorithm/own_algorithm.py.html").is_file()


@pytest.mark.extended
def test_site_loads_nothing_from_another_host(site):
    loading = r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+"""
    for page in site.rglob("*.html"):
        found = [tag for tag in re.findall(loading, page.read_text(encoding="utf-8")) if 'rel="canonical"' not in tag]
        assert found == [], page


@pytest.mark.extended
def test_api_page_has_every_public_name_of_the_package(root, site):
    text = (site / "api.html").read_text(encoding="utf-8")
    for name, module in rl_plugins._MODULES.items():
        assert f'id="rl_plugins.{module}.{name}"' in text, name


def test_foreign_names_are_made_from_the_page_of_other_projects(root):
    check = [sys.executable, str(root / "docs" / "foreign_names.py"), "--check"]
    assert subprocess.run(check, check=False).returncode == 0, "run python docs/foreign_names.py"


def test_api_page_and_stub_are_made_from_the_public_names(root):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "docs")
        api_page = importlib.import_module("api_page")
    assert (root / "docs" / "api.md").read_text(encoding="utf-8") == api_page.page(), "run python docs/api_page.py"
    assert (root / "rl_plugins" / "__init__.pyi").read_text(encoding="utf-8") == api_page.stub()
    del sys.modules["api_page"]


def test_links_of_readme_name_existing_files(root):
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", (root / "README.md").read_text(encoding="utf-8")):
        assert (root / link).exists(), link


@pytest.fixture
def linked_files(root) -> Iterator[ModuleType]:
    """The hook docs/linked_files.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "docs")
        yield importlib.import_module("linked_files")
    del sys.modules["linked_files"]


def test_links_of_docs_and_examples_lead_to_files(linked_files):
    for page, text in PAGES.items():
        if page.startswith(("docs/", "examples/")):
            for link in linked_files._LINK.findall(text):
                # The site stops at a link without a target.
                assert linked_files._target(page, link)


def test_target_refuses_a_link_to_a_missing_file(linked_files):
    message = "docs/index.md links to ../examples/nowhere, and there is no examples/nowhere"
    with pytest.raises(PluginError, match=re.escape(message)):
        linked_files._target("docs/index.md", "../examples/nowhere")
