"""Page of a recipe's options: the groups of the schema, with the meaning of each option from the docstrings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_type_hints

import omegaconf

from generator.docstrings import parse
from generator.markdown import page, sentence, table, yaml_value
from rl_plugins.config.recipe import RecipeConfig


def options_page() -> str:
    """Return the Markdown of the page."""
    return page([
        "# Options",
        "Options of every recipe, given as `group.option=value` on the command line. The values below are the "
        "defaults of the schema; a recipe's file in `recipes/conf` may set other values. `--cfg job` prints the whole "
        "configuration of a command line, and `--cfg diff` its differences from the recipe. The options of algorithms "
        "have [pages of their own](README.md).",
        *_sections(RecipeConfig, {a.name: _default(a) for a in fields(RecipeConfig)}, ""),
    ])  # fmt: skip


def _sections(group: type, defaults: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the description of a group, a table of its options with their defaults, then its inner groups."""
    docstring, hints = parse(group), get_type_hints(group)
    if prefix:
        yield f"## {prefix}"
        yield docstring.description
    own = [attribute for attribute in fields(group) if not is_dataclass(hints[attribute.name])]
    dotted = f"{prefix}." if prefix else ""
    rows = [(f"`{dotted}{a.name}`", _shown(defaults[a.name]), _meaning(docstring.arguments, a, group)) for a in own]
    yield table(("option", "value", "meaning"), rows)
    for attribute in fields(group):
        if is_dataclass(hints[attribute.name]):
            # A group inside may have other defaults than its class.
            yield from _sections(hints[attribute.name], vars(defaults[attribute.name]), f"{dotted}{attribute.name}")


def _default(option: Field[Any]) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _shown(default: object) -> str:
    return "required" if default == omegaconf.MISSING else f"`{yaml_value(default)}`"


def _meaning(meanings: dict[str, str], option: Field[Any], group: type) -> str:
    if option.name not in meanings:
        raise SystemExit(f"{group.__name__}.{option.name} is not explained: name it under Attributes")
    return sentence(meanings[option.name])
