"""The types of an algorithm's options, as the signatures of its functions declare them.

The node is open (`_target_` may name anyone's class), so the schema of a recipe cannot know them.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.loading import nearest

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", types.NoneType: "null"}


def check_option_types(algorithm: Algorithm) -> None:
    """Check the fields of the algorithm, and the options of its advantage and its policy loss.

    Raises:
        ConfigError: an option that the function does not take, or a value of the wrong type.
    """
    _check_fields("algorithm", algorithm)
    _check("algorithm.advantage_options", algorithm.advantage_function, algorithm.advantage_options)
    _check("algorithm.policy_loss_options", algorithm.policy_loss_function, algorithm.policy_loss_options)


def _check_fields(where: str, record: Any) -> None:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    _check(where, type(record), values)
    for name, value in values.items():
        if is_dataclass(value):
            _check_fields(f"{where}.{name}", value)


def _check(where: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    with_default = [name for name, parameter in parameters.items() if parameter.default is not parameter.empty]
    for name, value in options.items():
        if name not in parameters and not takes_any:
            raise ConfigError(f"{where}: {function.__name__} has no option {name!r}{nearest(name, with_default)}")
        if not _fits(value, hints.get(name, Any)):
            raise ConfigError(f"{where}.{name}={value}: must be {_words(hints[name])}")


def _fits(value: Any, wanted: Any) -> bool:
    if get_origin(wanted) in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(wanted))
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is wanted if wanted in _WORDS else True


def _words(wanted: Any) -> str:
    if get_origin(wanted) in (Union, types.UnionType):
        return " or ".join(_words(choice) for choice in get_args(wanted))
    if get_origin(wanted) is Literal:
        return f"one of {', '.join(map(str, get_args(wanted)))}"
    return _WORDS.get(wanted, getattr(wanted, "__name__", str(wanted)))
