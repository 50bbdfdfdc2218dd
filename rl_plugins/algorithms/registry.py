"""Registry of functions by name, to which installed packages add functions through entry points.

A package that declares

    [project.entry-points."rl_plugins.policy_losses"]
    my_loss = "my_package.losses:my_loss"

adds `my_loss` to the policy losses. The package is imported when the name is used for the first time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, TypeVar

from rl_plugins.errors import ConfigError

F = TypeVar("F")
Function = TypeVar("Function", bound=Callable[..., Any])


class Registry(Mapping[str, F]):
    """Functions of one kind by name: the project's own, and functions from the entry points of installed packages.

    Args:
        group: name of the entry-point group.
        own: the project's functions; an entry point cannot replace one of them.
    """

    def __init__(self, group: str, own: Mapping[str, F]) -> None:
        self.group, self._own = group, dict(own)

    @cached_property
    def _added(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self._own}

    def __getitem__(self, name: str) -> F:
        """Return the function with this name.

        Raises:
            KeyError: neither the project nor an installed package has the name.
        """
        if name in self._own:
            return self._own[name]
        function: F = self._added[name].load()
        return function

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, the project's own first."""
        yield from self._own
        yield from self._added

    def __len__(self) -> int:
        """Return the number of functions."""
        return len(self._own) + len(self._added)


def function_of(option: str, value: str | Function, table: Mapping[str, Function]) -> Function:
    """Return a function of a table by its name, a function by its dotted path, or the function itself.

    Args:
        option: name of the option, for errors.
        value: name in the table, dotted path of a function, or a function.
        table: known functions by name.

    Raises:
        ConfigError: the name or the path does not exist or gives no function, or a partial function has an argument
            that the function does not take.
    """
    function: Any = value
    if isinstance(value, str) and value in table:
        function = table[value]
    elif isinstance(value, str):
        if "." not in value:
            raise ConfigError(f"{option}={value!r} is unknown: use one of {', '.join(table)}, or a dotted path")
        try:
            function = resolve_name(value)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{option}={value}: {error}: correct the path, or add its folder to PYTHONPATH") from None
    if not callable(function):
        raise ConfigError(f"{option}={function!r}: must be a name, a dotted path or a function")
    if isinstance(function, partial):
        try:
            inspect.signature(function.func).bind_partial(*function.args, **function.keywords)
        except TypeError as error:
            known = ", ".join(inspect.signature(function.func).parameters)
            raise ConfigError(f"{option}: {function.func.__name__} {error}: its arguments are {known}") from None
    named: Function = function
    return named


def plain(function: Function) -> Function:
    """Return the function inside a partial function, such as a node with `_partial_: true`."""
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    plain_function: Function = inner
    return plain_function


def is_among(function: Function, functions: Iterable[Function]) -> bool:
    """Return True if a function, or the function inside a partial function, is one of some functions."""
    # An object with `__call__` may have no hash.
    return any(plain(function) is one for one in functions)


def bound_options(function: Function, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that a function gets from a partial function and from its options."""
    return {**(function.keywords if isinstance(function, partial) else {}), **options}


def named_function(table: Mapping[str, Function], loss: str | Function, options: Mapping[str, Any]) -> Function:
    """Return the loss with this name, or the function itself, after a check of its options.

    Args:
        table: known losses by name.
        loss: name of a loss, or a function.
        options: keyword arguments for the loss.

    Raises:
        ConfigError: the name is unknown, or the function does not take an option.
    """
    if isinstance(loss, str) and loss not in table:
        raise ConfigError(f"loss={loss!r} is unknown: use one of {', '.join(table)}")
    function = table[loss] if isinstance(loss, str) else loss
    try:
        inspect.signature(function).bind_partial(**options)
    except TypeError as error:
        raise ConfigError(f"loss_options do not fit the loss {function.__name__}: {error}") from None
    return function
