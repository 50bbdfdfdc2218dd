"""Tools of a recipe: the environment, and its checks before anything heavy starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.argument_errors import errors_with_options, options_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.environments.tools import ToolEnvironment

_ARGUMENTS = (
    "tools",
    "parser",
    "max_turns",
    "deadline_s",
    "max_characters",
    "left_out",
    "load_timeout_s",
    "memory_mb",
    "pass_env",
)


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
        with errors_with_options(options_in("environment", _ARGUMENTS)):
            yield
    except ConfigError as error:
        preset = ", or environment=tools, which sets 8" if str(error).startswith("environment.max_turns=") else ""
        raise ConfigError(f"{error}{preset}") from None
