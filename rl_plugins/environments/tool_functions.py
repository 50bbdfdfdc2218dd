"""Tools as Python functions: schema from type hints and docstring, check of arguments, call, and text of a result."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import resource
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

from rl_plugins.config.settings import AT_LEAST_1
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.limits import at_most

_THREADS = 1024
"""Largest number of calls of plain functions at once."""
_STACK = 8 * 2**20
"""Bytes of the stack of a thread."""


@dataclass(frozen=True)
class ToolResult:
    """Result of a tool with a reward of the turn.

    Attributes:
        content: result for the policy: a text, or a value that becomes JSON.
        reward: reward of the turn with the call.
    """

    content: object
    reward: float = 0.0


@dataclass(frozen=True)
class ToolSchema:
    """Description of a tool, and the check of arguments.

    Attributes:
        schema: JSON schema, in the form of a chat template.
        places: largest number of running calls; None for any number.
        is_closed: True if a call has no other arguments than those of the schema, as a call of a function.
    """

    schema: Mapping[str, Any]
    places: int | None
    is_closed: bool

    @property
    def name(self) -> str:
        """Name of the tool for the policy."""
        return str(self.schema["function"]["name"])

    def fault(self, arguments: Mapping[str, Any]) -> str:
        """Return a fault of the arguments for the policy, or an empty text."""
        from jsonschema.exceptions import SchemaError, best_match
        from referencing.exceptions import Unresolvable

        try:
            error = best_match(self._validator.iter_errors(dict(arguments)))
        # Not each server has a schema by the rules. The server itself checks the arguments, too.
        except (SchemaError, Unresolvable, re.error):
            return ""
        if error is None:
            return ""
        place = f"{error.json_path.removeprefix('$.')}: " if error.path else ""
        return f"{place}{error.message}"

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import extend, validator_for
        from referencing import Registry

        parameters = self.schema["function"].get("parameters") or {"type": "object"}
        if self.is_closed:
            parameters = {"additionalProperties": False, **parameters}
        draft = validator_for(parameters, default=Draft202012Validator)
        draft.check_schema(parameters)
        with_null = extend(draft, {name: _or_null(check) for name, check in draft.VALIDATORS.items()})
        # An empty registry, because a schema must not fetch other schemas.
        return with_null(parameters, registry=Registry())


@dataclass(frozen=True)
class Tool(ToolSchema):
    """Tool inside the process of the tools.

    Attributes:
        call: function of the arguments by name; returns an awaitable.
    """

    call: Callable[[Mapping[str, Any]], Awaitable[object]]


def _or_null(check: Callable[..., Iterable[Any] | None]) -> Callable[..., Iterable[Any]]:
    """Return a check that accepts null beside the keyword `nullable` of OpenAPI, which transformers writes, too."""

    def checked(validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]) -> Iterable[Any]:
        if instance is None and schema.get("nullable") is True:
            return ()
        return check(validator, value, instance, schema) or ()

    return checked


class Threads:
    """Threads for plain functions. A call can be left, but a thread cannot be ended.

    Attributes:
        stack_bytes: bytes of the stacks of all threads together.
    """

    stack_bytes = _THREADS * _STACK

    def __init__(self) -> None:
        self._calls = SimpleQueue[tuple[Future[object], Callable[[], object]]]()
        self._open: set[Future[object]] = set()
        self._left: set[Future[object]] = set()
        self._started = 0
        threading.stack_size(_STACK)

    async def run(self, function: Callable[[], object]) -> object:
        """Call a function in a thread. The thread goes on if the caller is cancelled.

        Raises:
            RuntimeError: the first thread cannot start. Without a further thread, the call waits for an earlier one.
        """
        future: Future[object] = Future()
        self._open = {earlier for earlier in self._open if not earlier.done()}
        if self._started < min(len(self._open) + 1, _THREADS):
            self._start_thread()
        self._open.add(future)
        self._calls.put((future, function))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._left.add(future)
            raise

    @property
    def stuck(self) -> int:
        """Number of running threads without a caller."""
        self._left = {future for future in self._left if not future.done()}
        return len(self._left)

    def _start_thread(self) -> None:
        limit, most = resource.getrlimit(resource.RLIMIT_DATA)
        if limit != most:
            # The kernel counts a stack in full, also without a use of its memory.
            resource.setrlimit(resource.RLIMIT_DATA, (at_most(limit + _STACK, most), most))
        try:
            threading.Thread(target=self._work, name="tool", daemon=True).start()
        except RuntimeError:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
            if not self._started:
                raise
        else:
            self._started += 1

    def _work(self) -> None:
        while True:
            future, function = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                # The caller of the function gets any exception.
                except BaseException as error:
                    future.set_exception(error)
            del future, function


def tool_of(name: str, function: Callable[..., Any], fixed: Mapping[str, Any], threads: Threads) -> Tool:
    """Return a tool for a function, or for an instance of a class with `__call__`.

    With the attribute `calls_at_once` of such an instance, further calls wait, and their time starts after the wait.

    Args:
        name: name of the function for messages.
        function: the function; a coroutine function is awaited, and any other function runs in a thread.
        fixed: arguments of every call, which the policy does not see.
        threads: threads for plain functions.

    Raises:
        ConfigError: an argument has no type hint or no description, the function has no docstring, or `calls_at_once`
            is no whole number of at least 1.
    """
    is_instance = not (inspect.isroutine(function) or isinstance(function, partial))
    called = getattr(function, "__call__") if is_instance else function  # noqa: B004, B009 (an instance's method)
    schema = _schema(name, called, fixed)
    if is_instance:
        schema["function"]["name"] = getattr(function, "name", type(function).__name__)
    if inspect.iscoroutinefunction(called):

        async def call(arguments: Mapping[str, Any]) -> object:
            return await called(**arguments, **fixed)

    else:

        async def call(arguments: Mapping[str, Any]) -> object:
            return await threads.run(partial(called, **arguments, **fixed))

    places = getattr(function, "calls_at_once", None) if is_instance else None
    if places is not None and (fault := AT_LEAST_1.fault(places, int)):
        raise ConfigError(f"tool {name!r}: calls_at_once={places!r}: {fault}")
    return Tool(schema, None if places is None else int(places), True, call)


def _schema(name: str, function: Callable[..., Any], fixed: Mapping[str, Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    # Its exceptions for docstrings and type hints have no common class, and functions without a name raise others.
    except Exception as error:
        raise ConfigError(
            f"tool {name!r}: {' '.join(str(error).split())}: the policy reads the docstring and the type hints, so "
            "write a docstring with a line for each argument under `Args:`, and a type hint for each argument"
        ) from None
    parameters = schema["function"]["parameters"]
    if unknown := sorted(fixed.keys() - parameters["properties"].keys()):
        raise ConfigError(f"tool {name!r} takes no argument {unknown[0]!r}: leave it out")
    for argument in fixed:
        del parameters["properties"][argument]
    if "required" in parameters:
        parameters["required"] = [argument for argument in parameters["required"] if argument not in fixed]
    return schema


def text_of(result: object) -> str:
    """Return a result as text: a text itself, JSON of plain values, or else `str`."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def shortened(text: str, max_characters: int, left_out: str) -> str:
    """Return a text with at most `max_characters` characters, and a mark in place of the part left out.

    Args:
        text: the text.
        max_characters: largest number of characters without the mark.
        left_out: part left out of a longer text: `beginning`, `middle` or `end`.
    """
    excess = len(text) - max_characters
    if excess <= 0:
        return text
    kept = {"beginning": 0, "middle": (max_characters + 1) // 2, "end": max_characters}[left_out]
    parts = text[:kept], f"[{excess} characters left out]", text[kept + excess :]
    return " ".join(part for part in parts if part)
