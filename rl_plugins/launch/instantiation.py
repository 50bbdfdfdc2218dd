"""Objects of options: nodes with `_target_`, and the training data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.python_file import callable_of_file
from rl_plugins.user_code import load_user_code


def instantiate_node(option: str, node: object) -> Any:
    """Build the object of a `_target_` node.

    Raises:
        ConfigError: the target does not exist, or refuses its arguments. The message begins with the option.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    if not isinstance(node, Mapping) or "_target_" not in node:
        raise ConfigError(f"{option} must be a mapping with the key _target_, the path of a class or function")
    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        # Hydra's message ends with the key of the inner node, if an inner node failed.
        key = re.search(r"^full_key: (.+)$", str(error), re.MULTILINE)
        where = f"{option}.{key[1]}" if key else option
        reason = " ".join(str(error.__cause__ or error).split())
        if isinstance(error.__cause__, TypeError) and "keyword-only" in reason:
            reason += ": add _partial_: true to a function that the run calls"
        # The error of a setting begins with the setting.
        names_setting = isinstance(error.__cause__, ConfigError) and re.match(r"[\w.]+=", reason)
        raise ConfigError(f"{where}{'.' if names_setting else ': '}{reason}") from None


def instantiate_nodes(option: str, nodes: Mapping[str, Any], kind: type) -> list[Any]:
    """Build the objects of named `_target_` nodes. A null in the place of a node is left out.

    Raises:
        ConfigError: a node cannot be built, or the object is not of the kind.
    """
    return [instantiate_as(f"{option}.{name}", node, kind) for name, node in nodes.items() if node]


def instantiate_as(option: str, node: object, kind: type) -> Any:
    """Build the object of a `_target_` node.

    Raises:
        ConfigError: the node cannot be built, or the object is not of the kind.
    """
    built = instantiate_node(option, node)
    if not isinstance(built, kind):
        raise ConfigError(f"{option}: a {type(built).__name__} is not a {kind.__name__} of Lightning: correct _target_")
    return built


def training_data(config: RecipeConfig) -> Any:
    """Return the training data for the data module of the stage.

    Raises:
        ConfigError: the recipe names no training data, or the custom data set cannot be built.
    """
    data = config.data
    if data.dataset is not None:
        return _own_data_set(data.dataset)
    if data.mixture:
        return data.mixture
    if not data.train_files:
        raise ConfigError("data.train_files is empty: name one or more parquet files")
    return list(data.train_files)


def _own_data_set(node: Mapping[str, Any]) -> Any:
    """Return the data set of `data.dataset`: of a node with `_target_`, or of a file."""
    if "_target_" in node:
        return instantiate_node("data.dataset", node)
    arguments = {key: value for key, value in node.items() if key not in ("path", "name")}
    build = callable_of_file(node["path"], node["name"], "data.dataset")
    return load_user_code(node["name"], "its call", lambda: build(**arguments), "data.dataset")
