"""Loading of a reward or a tool from its configuration: `_target_`, or the `path` of a file and a `name`.

    {_target_: my_package.rewards.length_penalty, weight: 0.1}   a function; every call gets `weight`
    {_target_: my_package.rewards.Judge, url: http://...}        a class; the constructor gets `url`
    {path: rewards.py, name: compute_score}                      either, from a file in no package

In Python, `_target_` may also be the function or class itself.

A missing name raises a ConfigError with the nearest existing name. An error of the user's own module or constructor
raises a ConfigError with the place of the error.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.python_file import callable_of, callable_of_file, nearest
from rl_plugins.user_code import load_user_code


def load_callable(config: Mapping[str, Any], kind: str) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Load the function or class of a configuration.

    Args:
        config: `_target_`, or `path` and `name`, and further keyword arguments.
        kind: first word of a message, such as `reward`.

    Returns:
        The name for messages, the callable, and the keyword arguments for every call. For a class, the
        callable is an instance made with the keyword arguments, and there are none for the calls.

    Raises:
        ConfigError: a key, module, file or name is missing, or a class does not take the keyword arguments.
    """
    name, function, options = find_callable(config, kind)
    if not inspect.isclass(function):
        return name, function, options
    check_constructor(name, function, options, kind)
    instance = load_user_code(name, "its constructor", lambda: function(**options), kind)
    if not callable(instance):
        raise ConfigError(f"{kind} {name!r}: the class has no method __call__")
    return name, instance, {}


def find_callable(config: Mapping[str, Any], kind: str) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Find the function or class of a configuration; no class is constructed.

    Args:
        config: `_target_`, or `path` and `name`, and further keyword arguments.
        kind: first word of a message, such as `reward`.

    Returns:
        The name for messages, the function or class, and the keyword arguments.

    Raises:
        ConfigError: a key, module, file or name is missing.
    """
    options = {str(key): plain(value) for key, value in config.items()}
    name = name_of(options)
    if callable(found := options.get("_target_")):
        del options["_target_"]
    elif "_target_" in options:
        module_name, _, attribute = str(options.pop("_target_")).rpartition(".")
        found = callable_of(_import_module(module_name, name, kind), attribute, f"{kind} {name!r}")
    elif "path" in options and "name" in options:
        found = callable_of_file(str(options.pop("path")), str(options.pop("name")), kind)
    else:
        raise ConfigError(f"{kind} {options!r} names no function: give `_target_`, or `path` and `name`")
    return name, found, options


def name_of(config: Mapping[str, Any]) -> str:
    """Return the name of a reward for messages, before the reward is loaded."""
    target = config.get("_target_")
    if callable(target):
        return str(getattr(target, "__qualname__", type(target).__name__))
    return str(target) if target else f"{config.get('path')}:{config.get('name')}"


def check_constructor(name: str, function: Callable[..., Any], options: Mapping[str, Any], kind: str) -> None:
    """Raise a ConfigError if the constructor of a class does not take the keyword arguments."""
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r}: the options do not fit its constructor: {error}") from error


def plain(value: object) -> Any:
    """Turn containers of a configuration, also OmegaConf containers, into dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def _import_module(module_name: str, target: str, kind: str) -> ModuleType:
    if not module_name:
        raise ConfigError(f"{kind} {target!r}: `_target_` must be dotted, such as 'my_package.{kind}s.{target}'")

    def load() -> ModuleType:
        try:
            return importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise _not_found(module_name, target, error, kind) from error

    return load_user_code(target, f"importing {module_name}", load, kind)


def _not_found(module_name: str, target: str, error: ModuleNotFoundError, kind: str) -> ConfigError:
    missing = error.name or ""
    if not f"{module_name}.".startswith(f"{missing}."):
        return ConfigError(f"{kind} {target!r}: importing {module_name} failed: {error}")
    parent, _, child = missing.rpartition(".")
    folder = sys.modules[parent].__path__ if parent in sys.modules else None
    hint = nearest(child, [info.name for info in pkgutil.iter_modules(folder)]) if folder else ""
    return ConfigError(f"{kind} {target!r}: no module {missing!r}{hint}")
