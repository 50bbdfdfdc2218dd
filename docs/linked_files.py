"""A hook of MkDocs: whatever file of the repository a page links to becomes a page of the site, so no link leaves it.

Pages link to files as on any view of the repository, `../examples/own_algorithm/own_algorithm.py`. Here Markdown is
taken as it is, code is shown in a block, and a link to a folder leads to its README.md.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)#\s]+")
_BESIDE = "repository/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file outside docs/ that a page links to, and for those that these link to."""
    waiting = [(_in_repository(file.src_uri), file.content_string) for file in files.documentation_pages()]
    while waiting:
        source, text = waiting.pop()
        for link in _LINK.findall(text):
            target = _target(source, link)
            if not target.startswith("docs/") and files.get_file_from_path(_in_site(target)) is None:
                content = (ROOT / target).read_text(encoding="utf-8")
                files.append(File.generated(config, _in_site(target), content=_as_page(target, content)))
                waiting.append((target, content if target.endswith(".md") else ""))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links between the files lead from page to page."""
    here = page.file.src_uri
    source = _in_repository(here)
    return _LINK.sub(
        lambda link: posixpath.relpath(_in_site(_target(source, link[0])), posixpath.dirname(here)), markdown
    )


def _in_repository(page: str) -> str:
    """Path of a page's file in the repository."""
    return page.removeprefix(_BESIDE) if page.startswith(_BESIDE) else f"docs/{page}"


def _in_site(path: str) -> str:
    """Path of the page that shows a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{_BESIDE}{path}" if path.endswith(".md") else f"{_BESIDE}{path}.md"


def _target(source: str, link: str) -> str:
    """Path in the repository of what a file of it links to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    path = f"{path}/README.md" if (ROOT / path).is_dir() else path
    if not (ROOT / path).is_file():
        raise PluginError(f"{source} links to {link}, and there is no {path}")
    return path


def _as_page(path: str, content: str) -> str:
    suffix = path.rpartition(".")[2]
    return content if suffix == "md" else f"# {path}\n\n```{suffix}\n{content}```\n"
