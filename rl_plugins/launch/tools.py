"""Tools of a recipe: the environment, and its checks before anything heavy starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.environments.tools import ToolEnvironment

_ARGUMENTS = ("tools", "parser", "max_turns", "deadline_s", "max_characters", "load_timeout_s", "memory_mb", "pass_env")
_NAMED = re.compile(rf"(?P<before>^|or raise )(?P<name>{'|'.join(_ARGUMENTS)})(?=[=:]|$)")
"""Argument of `ToolEnvironment` in an error: at the beginning, or in the way out."""


def tool_environment(config: RecipeConfig) -> ToolEnvironment | None:
    """Return the tools of the options `environment`; None without tools.

    Raises:
        ConfigError: a tool cannot be used; see `ToolEnvironment`.
    """
    options = config.environment
    if not options.tools or not config.generates:
        return None
    from rl_plugins.environments.tools import ToolEnvironment

    with _errors_with_options():
        return ToolEnvironment(
            **{name: getattr(options, name) for name in _ARGUMENTS}, template_options=config.data.chat_template_kwargs
        )


def check_tools(config: RecipeConfig, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Start the tools once, and return the variables of the chat template, which show the tools.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the policy; None if the tokenizer is not on this machine.

    Raises:
        ConfigError: a tool cannot be used, or the tokenizer has no place for tools; see `ToolEnvironment`.
    """
    tools = tool_environment(config)
    if tools is None:
        return config.data.chat_template_kwargs
    try:
        if tokenizer is not None:
            with _errors_with_options():
                tools.check(tokenizer)
        return tools.template_options
    finally:
        tools.close()


@contextmanager
def _errors_with_options() -> Iterator[None]:
    """Name options in place of the arguments of `ToolEnvironment` in errors."""
    try:
        yield
    except ConfigError as error:
        message = _NAMED.sub(r"\g<before>environment.\g<name>", str(error))
        preset = ", or environment=tools, which sets 8" if message.startswith("environment.max_turns=") else ""
        raise ConfigError(f"{message}{preset}") from None
