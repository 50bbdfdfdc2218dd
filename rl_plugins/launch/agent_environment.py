"""Agent of a recipe, and its trial before anything heavy starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.argument_errors import errors_with_options, options_in
from rl_plugins.launch.stateful_environment import answer_of_trial, check_alone

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.data.parquet import Row
    from rl_plugins.environments.agent import AgentEnvironment
    from rl_plugins.environments.agent_conversations import AgentConversations

_ARGUMENTS = (
    "agent",
    "parser",
    "max_turns",
    "max_sequences",
    "max_objects",
    "deadline_s",
    "load_timeout_s",
    "memory_mb",
    "pass_env",
    "endpoint_host",
)


def agent_environment(config: RecipeConfig) -> AgentEnvironment | None:
    """Return the environment of the option `environment.agent`; None without the option.

    Raises:
        ConfigError: the agent cannot be used (see `AgentEnvironment`), or there are tools, another environment or a
            reward beside the agent.
    """
    options = config.environment
    if options.agent is None or not config.scores:
        return None
    if not options.agent:
        raise ConfigError(
            "environment.agent: name a function of a row, a base_url and an api_key, such as my_package.solve"
        )
    check_alone(config, "agent", "an agent returns the reward of its trajectory")
    from rl_plugins.environments.agent import AgentEnvironment

    with errors_with_options(options_in("environment", _ARGUMENTS)):
        return AgentEnvironment(
            **{name: getattr(options, name) for name in _ARGUMENTS},
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_failure_rate=config.reward.max_failure_rate,
            template_options=config.data.chat_template_kwargs,
        )


def check_agent(
    config: RecipeConfig, first_of_source: Mapping[str, Row], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Load the agent, and let it make its first call for a row of each data source.

    Args:
        config: configuration of the run.
        first_of_source: a row of each data source.
        tokenizer: tokenizer of the policy; None, which leaves out the calls, if the tokenizer is not on this machine.

    Raises:
        ConfigError: the agent cannot be used, or fails before its first call.
    """
    environment = agent_environment(config)
    if environment is None:
        return
    try:
        if tokenizer is None:
            return
        with errors_with_options(options_in("environment", _ARGUMENTS)):
            conversations = environment.connect(tokenizer)
        for number, row in enumerate(first_of_source.values()):
            _try_out(conversations, number, row)
    finally:
        environment.close()


def _try_out(conversations: AgentConversations, number: int, row: Row) -> None:
    """Let an agent run until its first call.

    Raises:
        ConfigError: the agent fails, ends without a call, or its call is refused.
    """
    from rl_plugins.rewards.records import scoring_request

    conversations.start(number, scoring_request("", row), seed=0)
    answer_of_trial(
        conversations, f"the agent fails on a row of data_source {row['data_source']!r} before its first call"
    )
    conversations.forget([number])
