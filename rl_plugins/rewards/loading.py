"""From configuration to callable: a reward is named by `_target_`, or by a file's `path` and a `name`.

    {_target_: my_package.rewards.length_penalty, weight: 0.1}   a function; every call gets `weight`
    {_target_: my_package.rewards.Judge, url: http://...}        a class; its constructor gets `url`
    {path: rewards.py, name: compute_score}                      either, from a file that is in no package

In Python `_target_` may also be the function or class itself.

Whatever is missing is a ConfigError that names the nearest thing that exists. Errors raised by the user's own
module while it is imported keep their traceback.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_plugins.errors import ConfigError


def load_reward(config: Mapping[str, Any]) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    """Load what `config` names.

    Returns:
        Its name for messages; the callable (of a class: an instance made with the configured keyword
        arguments); the keyword arguments to pass to every call (of a class: none).

    Raises:
        ConfigError: A key, module, file or name is missing, or a class does not take the keyword arguments.
    """
    options = {str(key): plain(value) for key, value in config.items()}
    if callable(options.get("_target_")):
        function = options.pop("_target_")
        return _ready(getattr(function, "__qualname__", type(function).__name__), function, options)
    if "_target_" in options:
        name = str(options.pop("_target_"))
        module_name, _, attribute = name.rpartition(".")
        module = _import_module(module_name, name)
    elif "path" in options and "name" in options:
        path, attribute = Path(str(options.pop("path"))), str(options.pop("name"))
        name, module = f"{path}:{attribute}", _import_file(path)
    else:
        raise ConfigError(f"reward {options!r} names no function: give `_target_`, or `path` and `name`")
    found: Any = getattr(module, attribute, None)
    if not callable(found):
        offered = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        problem = "has no" if found is None else "holds, but not as a function or class,"
        hint = nearest(attribute, offered)
        raise ConfigError(f"reward {name!r}: {module.__name__} {problem} {attribute!r}{hint}")
    return _ready(name, found, options)


def _ready(
    name: str, function: Callable[..., Any], options: dict[str, Any]
) -> tuple[str, Callable[..., Any], dict[str, Any]]:
    if not inspect.isclass(function):
        return name, function, options
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ConfigError(f"reward {name!r}: the options do not fit its constructor: {error}") from error
    instance = function(**options)
    if not callable(instance):
        raise ConfigError(f"reward {name!r}: the class has no method __call__")
    return name, instance, {}


def nearest(wanted: str, existing: Iterable[str]) -> str:
    """The end of an error message: "; did you mean 'x'?", else the list of what exists."""
    names = sorted(set(existing))
    close = get_close_matches(wanted, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is: {', '.join(names[:20])}" if names else ""


def plain(value: Any) -> Any:
    """Turn configuration containers, OmegaConf's too, into dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def _import_module(module_name: str, target: str) -> ModuleType:
    if not module_name:
        raise ConfigError(f"reward {target!r}: `_target_` must be dotted, such as 'my_package.rewards.{target}'")
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(f"reward {target!r}: importing {module_name} failed: {error}") from error
        parent, _, child = missing.rpartition(".")
        folder = sys.modules[parent].__path__ if parent in sys.modules else None
        hint = nearest(child, [info.name for info in pkgutil.iter_modules(folder)]) if folder else ""
        raise ConfigError(f"reward {target!r}: no module {missing!r}{hint}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        siblings = [str(file) for file in path.parent.glob("*.py")]
        raise ConfigError(f"reward file {str(path)!r} does not exist{nearest(str(path), siblings)}")
    digest = sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}_{digest}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward file {str(path)!r} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module
