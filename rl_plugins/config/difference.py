"""Difference between a recipe and a run's configuration: `--cfg diff`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ABSENT = object()


def difference(recipe: object, config: object) -> str:
    """Return a line of YAML for each different option, with the recipe's value in a comment.

    Args:
        recipe: Configuration composed without overrides.
        config: Configuration composed with overrides.
    """
    from omegaconf import OmegaConf

    before, after = (dict(_options(OmegaConf.to_container(node))) for node in (recipe, config))
    keys = [*after, *(key for key in before if key not in after)]
    lines = [
        f"{key}: {_yaml(after.get(key, _ABSENT))}  # recipe: {_yaml(before.get(key, _ABSENT))}"
        for key in keys
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]
    return "\n".join(lines) or "nothing differs from the recipe"


def _options(node: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each option."""
    if isinstance(node, dict):
        for name, child in node.items():
            yield from _options(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node


def _yaml(value: object) -> str:
    import yaml

    if value is _ABSENT:
        return "(none)"
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("...\n").strip()
