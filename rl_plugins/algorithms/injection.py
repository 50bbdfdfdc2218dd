"""Calling a function with those of many inputs that its signature names.

An advantage estimator or a policy loss asks for what it needs by the names of its keyword arguments. What it must
have is computed for it; what it can do without (an argument with a default) it gets if it is there anyway.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

R = TypeVar("R")


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
