"""The page of a recipe's options: the groups of its schema, with what the docstrings say of each option."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

import omegaconf

from generator.docstrings import parse
from generator.markdown import page, sentence, table, yaml_value
from rl_plugins.launch.config import RecipeConfig


def options_page() -> str:
    """The Markdown of the page."""
    return page([
        "# Options",
        "Of every recipe, as `group.option=value` on the command line; the values are those of the schema, which a "
        "recipe's file in `recipes/conf` may set otherwise. `--cfg job` prints what a command line amounts to, and "
        "`--cfg diff` what differs from the recipe. The options of algorithms have [pages of their own](README.md).",
        *_sections(RecipeConfig, ""),
    ])  # fmt: skip


def _sections(group: type, prefix: str) -> Iterator[str]:
    """What a group is, a table of its options, then its groups."""
    docstring, hints = parse(group), get_type_hints(group)
    if prefix:
        yield f"## {prefix}"
        yield docstring.description
    own = [attribute for attribute in fields(group) if not is_dataclass(hints[attribute.name])]
    dotted = f"{prefix}." if prefix else ""
    rows = [(f"`{dotted}{a.name}`", _value(a), _meaning(docstring.arguments, a, group)) for a in own]
    yield table(("option", "value", "meaning"), rows)
    for attribute in fields(group):
        if is_dataclass(hints[attribute.name]):
            yield from _sections(hints[attribute.name], f"{dotted}{attribute.name}")


def _value(option: Field[Any]) -> str:
    value = option.default
    if option.default_factory is not MISSING:
        value = option.default_factory()
    return "to be given" if value == omegaconf.MISSING else f"`{yaml_value(value)}`"


def _meaning(meanings: dict[str, str], option: Field[Any], group: type) -> str:
    if option.name not in meanings:
        raise SystemExit(f"{group.__name__}.{option.name} is not explained: name it under Attributes")
    return sentence(meanings[option.name])
