"""A function or class of the user in a Python file that belongs to no package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.user_code import load_user_code


def callable_of_file(path: str, name: str, kind: str) -> Callable[..., Any]:
    """Return a function or class of a file.

    Args:
        path: Python file.
        name: name of the function or class.
        kind: first words of an error, such as `reward`.

    Raises:
        ConfigError: the file or the name is missing, or the file raises an error.
    """
    label = f"{path}:{name}"
    return callable_of(_import_file(Path(path), label, kind), name, f"{kind} {label!r}")


def callable_of(module: ModuleType, name: str, label: str) -> Callable[..., Any]:
    """Return a function or class of a module.

    Args:
        module: imported module.
        name: name of the function or class.
        label: first words of an error.

    Raises:
        ConfigError: the module has no function or class of this name. The message has the nearest existing name.
    """
    found: Any = getattr(module, name, None)
    if not callable(found):
        offered = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        problem = "has no" if found is None else "has, but not as a function or class,"
        raise ConfigError(f"{label}: {module.__name__} {problem} {name!r}{nearest(name, offered)}")
    return found


def nearest(wanted: str, existing: Iterable[str]) -> str:
    """Return the end of an error message: "; did you mean 'x'?", or else the list of existing names."""
    names = sorted(set(existing))
    close = get_close_matches(wanted, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there is: {', '.join(names[:20])}" if names else ""


def _import_file(path: Path, label: str, kind: str) -> ModuleType:
    if not path.is_file():
        siblings = [str(file) for file in path.parent.glob("*.py")]
        raise ConfigError(f"{kind} file {str(path)!r} does not exist{nearest(str(path), siblings)}")
    digest = sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"file_{path.stem}_{digest}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{kind} file {str(path)!r} is not a Python file: the name must end in .py")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    load_user_code(label, "its file", lambda: loader.exec_module(module), kind)
    return module
