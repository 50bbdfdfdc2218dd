"""Options from the environment: files of a run have the expression `${oc.env:NAME}`, and never the variable's value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import MISSING, OmegaConf

OptionPath = tuple[str | int, ...]
"""Names of the groups around an option, the name of the option, and the position in a list."""

# `${...}` with up to two levels of expressions inside.
_EXPRESSION = re.compile(r"\$\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}")

_NO_VALUE = "\0no value\0"


def resolved_without_environment(config: object) -> Any:
    """Return a configuration as plain values, with all expressions resolved but those with the environment.

    An option that refers to an option from the environment has the expression of the other option.

    Args:
        config: node of OmegaConf.
    """
    # OmegaConf turns an escaped expression into its text, and refuses references to options without a value.
    escaped = _changed(OmegaConf.to_container(config), _escaped)
    resolved = OmegaConf.to_container(OmegaConf.create(escaped), resolve=True)
    return _changed(resolved, lambda text: MISSING if _NO_VALUE in text else text)


def environment_expressions(config: object) -> dict[OptionPath, str]:
    """Return the expressions with the environment in a configuration, by the path of the option.

    Args:
        config: node of OmegaConf.
    """
    if "oc.env:" not in str(OmegaConf.to_container(config)):
        return {}
    return {path: text for path, text in _texts(resolved_without_environment(config)) if "oc.env:" in text}


def value_at(options: Any, path: OptionPath) -> Any:
    """Return the value at a path of plain options; None if there is none."""
    for name in path:
        try:
            options = options[name]
        except (KeyError, IndexError, TypeError):
            return None
    return options


def _escaped(text: str) -> str:
    if text == MISSING:
        return _NO_VALUE
    return _EXPRESSION.sub(lambda match: match[0].replace("${", "\\${") if "oc.env:" in match[0] else match[0], text)


def _changed(node: object, change: Callable[[str], str]) -> Any:
    if isinstance(node, dict):
        return {name: _changed(child, change) for name, child in node.items()}
    if isinstance(node, list):
        return [_changed(child, change) for child in node]
    return change(node) if isinstance(node, str) else node


def _texts(node: object, path: OptionPath = ()) -> Iterator[tuple[OptionPath, str]]:
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _texts(child, (*path, name))
