"""Configurations of recipes in milliseconds, for tests with many of them: Hydra composes each recipe once."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rl_plugins.config.hydra_errors import CONFIG_FOLDER
from rl_plugins.config.recipe import RecipeConfig, parse_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch import command_line, pipeline
from rl_plugins.launch.compose import compose_config

compose_config_once = cache(lambda recipe, overrides: compose_config(recipe, list(overrides)))
"""`compose_config` with a tuple of overrides; the caller must not change the result."""


def compose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands and pipelines compose each recipe once for all tests: Hydra takes long, the result is only read."""
    for module in (command_line, pipeline):
        monkeypatch.setattr(
            module, "compose_config", lambda name, overrides, *_: compose_config_once(name, (*overrides,))
        )


def configured(recipe: str, *overrides: str) -> RecipeConfig:
    """Return `parse_config(compose_config(recipe, overrides))`.

    Hydra composes only the overrides that choose a file of a group, add an option or remove one. Values of the other
    overrides replace values in Hydra's result.
    """
    composed = [override for override in overrides if _is_for_hydra(override)]
    values = deepcopy(_own_values(recipe, tuple(composed)))
    others = [override for override in overrides if not _is_for_hydra(override)]
    for override in OverridesParser.create().parse_overrides(others):
        *groups, option = override.key_or_group.split(".")
        node = values
        for group in groups:
            node = node.setdefault(group, {})
        node[option] = override.value()
    return parse_config(values)


def message_of(check: Callable[[], object]) -> str:
    """Return the message of the ConfigError raised by a check; without an error, return "nothing is refused"."""
    try:
        check()
    except ConfigError as error:
        return str(error)
    return "nothing is refused"


def _is_for_hydra(override: str) -> bool:
    key = override.partition("=")[0]
    return key.startswith(("+", "~")) or (CONFIG_FOLDER / key).is_dir()


@cache
def _own_values(recipe: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Return the groups of a recipe with changes to the schema: `parse_config` is faster with fewer values."""
    values: Any = OmegaConf.to_container(compose_config_once(recipe, overrides))
    return {name: value for name, value in values.items() if name not in _defaults() or value != _defaults()[name]}


@cache
def _defaults() -> Any:
    return OmegaConf.to_container(OmegaConf.structured(RecipeConfig))
