"""Calling a function with those of many inputs that its signature names.

An advantage estimator or a policy loss asks for what it needs by the names of its keyword arguments. What it must
have is computed for it; what it can do without (an argument with a default) it gets if it is there anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rl_plugins.errors import ConfigError

R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def required_inputs(function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """Names of the keyword arguments that have neither a default nor an option."""
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
        and parameter.default is parameter.empty
        and parameter.name not in options
    ]


def call_with(function: Callable[..., R], inputs: Mapping[str, Any], options: Mapping[str, Any]) -> R:
    """Call with the options and with the inputs that the function names; inputs that are None are not there."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {name: value for name, value in inputs.items() if value is not None and (takes_any or name in parameters)}
    return function(**{**given, **options})


def named_function(table: Mapping[str, F], loss: str | F, options: Mapping[str, Any]) -> F:
    """The loss of that name, or the function itself.

    Raises:
        ConfigError: an unknown name, or an option that the function does not take.
    """
    if isinstance(loss, str) and loss not in table:
        raise ConfigError(f"loss={loss!r} is unknown: use one of {', '.join(table)}")
    function = table[loss] if isinstance(loss, str) else loss
    try:
        inspect.signature(function).bind_partial(**options)
    except TypeError as error:
        raise ConfigError(f"loss_options do not fit the loss {function.__name__}: {error}") from None
    return function
