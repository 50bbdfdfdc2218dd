"""Parser of Google docstrings: sections as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, is_dataclass


@dataclass
class Docstring:
    """Sections of a docstring; a missing section is empty."""

    summary: str = ""
    description: str = ""
    when: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    returns: str = ""
    raises: dict[str, str] = field(default_factory=dict)
    source: str = ""


def parse(documented: object) -> Docstring:
    """Parse the docstring of an object; a dataclass also has the attributes of its base classes."""
    parsed = parse_text(inspect.getdoc(documented) or "")
    if is_dataclass(documented):
        for base in filter(is_dataclass, documented.__mro__[1:] if isinstance(documented, type) else ()):
            parsed.arguments = parse_text(inspect.getdoc(base) or "").arguments | parsed.arguments
    return parsed


def parse_text(text: str) -> Docstring:
    """Parse a docstring without indentation."""
    parsed = Docstring()
    texts: dict[str, list[str]] = {"": []}
    section = ""
    for line in text.splitlines():
        heading = re.match(r"(When|Args|Attributes|Returns|Raises|Source):(.*)", line)
        if heading:
            section = heading[1]
            texts[section] = [heading[2].strip()] if heading[2] else []
        else:
            texts[section].append(line)
    parsed.description = _as_markdown("\n".join(texts[""]).strip())
    parsed.summary = " ".join(parsed.description.split("\n\n")[0].split())
    parsed.when = _as_markdown(_one_line(texts.get("When", [])))
    parsed.arguments = _named(texts.get("Args", []) + texts.get("Attributes", []))
    parsed.returns = _as_markdown(_one_line(texts.get("Returns", [])))
    parsed.raises = _named(texts.get("Raises", []))
    parsed.source = _one_line(texts.get("Source", []))
    return parsed


def _one_line(lines: Iterable[str]) -> str:
    return " ".join(" ".join(lines).split())


def _named(lines: Iterable[str]) -> dict[str, str]:
    """Parse entries of the form `name: text`, with indented continuation lines."""
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        start = re.match(r" {4}(\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif line.strip():
            found[name] += " " + line.strip()
    return {name: _as_markdown(text) for name, text in found.items()}


def _as_markdown(text: str) -> str:
    """Escape `<` outside of code spans, because Markdown would read it as HTML."""
    spans = re.split(r"(`[^`]*`)", text)
    return "".join(span if span.startswith("`") else span.replace("<", "\\<") for span in spans)
