"""Page of the options that all algorithms share: the fields of `Algorithm`, and of the objects in these fields."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_type_hints

from generator.algorithms import common_values
from generator.docstrings import parse
from generator.functions import table_of_names
from generator.markdown import NOT_IN_YAML, page, table, yaml_value
from rl_plugins.algorithms import rollout_correction
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.rollout_correction import ROLLOUT_CORRECTIONS


def common_options_page() -> str:
    """Return the Markdown of the page."""
    return page([
        "# Common options",
        "Every algorithm has the options below. An algorithm whose YAML file does not set an option has the value of "
        "`recipes/conf/algorithm/parts/base.yaml`.",
        *_sections(Algorithm, "algorithm", common_values()),
        NOT_IN_YAML,
        "## Names of rollout corrections",
        "`algorithm.correction=NAME` takes one of the named corrections:",
        table_of_names("ROLLOUT_CORRECTIONS", rollout_correction, ROLLOUT_CORRECTIONS),
        parse(rollout_correction).description,
    ])  # fmt: skip


def _sections(known: type, prefix: str, values: object) -> Iterator[str]:
    """Yield a heading, the description of a class and its options; then the same for the classes of its fields."""
    docstring, hints = parse(known), get_type_hints(known)
    inner = {name: held for name, hint in hints.items() for held in _dataclasses_in(hint)}
    in_list = prefix.endswith("[]")
    yield f"## {prefix}: {known.__name__}"
    yield docstring.description if known is not Algorithm else ""
    if in_list:
        yield f"One element of `{prefix.removesuffix('[]')}`: `{_as_node(known)}`."
    elif not isinstance(values, Mapping):
        yield f"`{yaml_value(values)}`, or an object with its options between the braces:"
        yield f"```bash\n'{prefix}={_as_node(known)}'\n```"
        yield f"If the algorithm has set the object already, `++{prefix}.OPTION=VALUE` changes one option."
    yield table(("option", "value", "meaning"), _rows(known, prefix, values, docstring.arguments, inner))
    if docstring.source:
        yield f"Source: {docstring.source}"
    for name, inner_class in inner.items():
        repeated = "[]" if "tuple" in str(hints[name]) else ""
        value = values.get(name) if isinstance(values, Mapping) else None
        yield from _sections(inner_class, f"{prefix}.{name}{repeated}", value)


def _rows(
    known: type, prefix: str, values: object, meanings: Mapping[str, str], inner: Mapping[str, type]
) -> Iterator[tuple[str, str, str]]:
    for attribute in fields(known):
        name, meaning = attribute.name, meanings.get(attribute.name, "")
        if name in inner:
            meaning += f" See {prefix}.{name} below."
        if isinstance(values, Mapping) and name in values:
            value = values[name]
            shown = f"`{inner[name].__name__}`" if isinstance(value, Mapping) and name in inner else _code(value)
            yield f"`{prefix}.{name}`", shown, meaning
        elif name == "advantage":
            yield f"`{prefix}.{name}`", "set by each algorithm", meaning
        elif isinstance(values, Mapping):
            yield f"`++{prefix}.{name}`", _code(attribute.default), meaning
        else:
            yield f"`{name}`", _code(attribute.default), meaning


def _code(value: object) -> str:
    return "needed" if value is MISSING else f"`{yaml_value(value)}`"


def _dataclasses_in(hint: object) -> Iterator[type]:
    """Yield the dataclasses in a type hint."""
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    for argument in get_args(hint):
        yield from _dataclasses_in(argument)


def _as_node(known: type) -> str:
    """Format a class with its required arguments as YAML."""
    needed = [
        f"{f.name}: {f.name.upper()}" for f in fields(known) if f.default is MISSING and f.default_factory is MISSING
    ]
    return "{" + ", ".join([f"_target_: {sys.modules[known.__module__].__name__}.{known.__name__}", *needed]) + "}"
