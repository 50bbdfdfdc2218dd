"""Tools of a recipe: the environment, and its checks before anything heavy starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_plugins.config.recipe import RecipeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.environments.tools import ToolEnvironment


def tool_environment(config: RecipeConfig) -> ToolEnvironment | None:
    """Return the tools of the options `environment`; None without tools.

    Raises:
        ConfigError: a tool cannot be used; see `ToolEnvironment`.
    """
    options = config.environment
    if not options.tools or not config.generates:
        return None
    from rl_plugins.environments.tools import ToolEnvironment

    return ToolEnvironment(
        options.tools,
        parser=options.parser,
        max_turns=options.max_turns,
        deadline_s=options.deadline_s,
        max_characters=options.max_characters,
        load_timeout_s=options.load_timeout_s,
        memory_mb=options.memory_mb,
        pass_env=options.pass_env,
        template_options=config.data.chat_template_kwargs,
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
            tools.check(tokenizer)
        return tools.template_options
    finally:
        tools.close()
