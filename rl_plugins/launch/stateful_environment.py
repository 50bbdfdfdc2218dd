"""Stateful environment of a recipe, and its trial before anything heavy starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.argument_errors import errors_with_options, options_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.data.parquet import Row
    from rl_plugins.environments.stateful import StatefulEnvironment
    from rl_plugins.rewards.conversations import Environment
    from rl_plugins.rewards.records import ScoringRequest
    from rl_plugins.rewards.trajectory import EnvironmentAnswer

_ARGUMENTS = (
    "max_turns", "max_objects", "deadline_s", "load_timeout_s", "memory_mb", "pass_env", "max_observation_tokens",
)  # fmt: skip
# A response without an answer, as an untrained policy may give.
_NO_ANSWER = "?"


def stateful_environment(config: RecipeConfig) -> StatefulEnvironment | None:
    """Return the environment of the option `environment.stateful`; None without the option.

    Raises:
        ConfigError: the environment cannot be used (see `StatefulEnvironment`), or there are tools or a reward beside
            the environment.
    """
    options = config.environment
    if options.stateful is None or not config.generates:
        return None
    if not options.stateful:
        raise ConfigError(
            "environment.stateful: name a class with async reset, step and close, such as my_package.Game"
        )
    check_alone(config, "stateful", "a stateful environment scores its conversations by itself")
    from rl_plugins.environments.stateful import StatefulEnvironment

    with errors_with_options(options_in("environment", _ARGUMENTS)):
        return StatefulEnvironment(
            options.stateful,
            **{name: getattr(options, name) for name in _ARGUMENTS},
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_failure_rate=config.reward.max_failure_rate,
            template_options=config.data.chat_template_kwargs,
        )


def check_alone(config: RecipeConfig, option: str, reason: str) -> None:
    """Check that there are no tools, no other environment and no reward beside an environment with rewards.

    Args:
        config: configuration of the run.
        option: option of the environment.
        reason: reason why there is no reward beside the environment.

    Raises:
        ConfigError: there is something beside the environment.
    """
    for other in ("tools", "stateful", "agent"):
        if other != option and getattr(config.environment, other) not in (None, []):
            raise ConfigError(
                f"environment.{option} and environment.{other}: an environment is one of the two: leave one out"
            )
    if config.reward.functions:
        raise ConfigError(f"reward: {reason}: choose reward=environment, and let the environment return the reward")


def check_stateful(
    config: RecipeConfig, first_of_source: Mapping[str, Row], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Load the environment, and let an object start and answer for a row of each data source.

    Args:
        config: configuration of the run.
        first_of_source: a row of each data source.
        tokenizer: tokenizer of the policy; None, which leaves out the objects, if the tokenizer is not on this machine.

    Raises:
        ConfigError: the environment cannot be used, or an object fails.
    """
    from rl_plugins.rewards.records import scoring_request

    environment = stateful_environment(config)
    if environment is None:
        return
    try:
        if tokenizer is None:
            return
        for row in first_of_source.values():
            _try_out(environment, scoring_request("", row), tokenizer)
    finally:
        environment.close()


def _try_out(environment: StatefulEnvironment, request: ScoringRequest, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let an object start with a row, and answer one response.

    Raises:
        ConfigError: the object fails, or the chat template refuses its messages.
    """
    from rl_plugins.environments.object_conversations import StatefulConversations
    from rl_plugins.rewards.trajectory import Start, Turn

    conversations = StatefulConversations(environment.host, tokenizer, environment)
    fault = f"the environment fails on a row of data_source {request.data_source!r}"
    conversations.start(0, request, seed=0)
    answer = answer_of_trial(conversations, fault)
    if isinstance(answer, Start):
        asked = replace(
            request, solution_str=_NO_ANSWER, prompt=list(answer.messages), turns_left=environment.max_turns - 1
        )
        conversations.begin(0, Turn(asked, answer.tokens, 0))
        answer_of_trial(conversations, fault)


def answer_of_trial(conversations: Environment, fault: str) -> EnvironmentAnswer:
    """Wait for the answer to the only conversation of a trial, and return the answer.

    Args:
        conversations: conversations with the environment.
        fault: text of the error, without the reason.

    Raises:
        ConfigError: the answer is a failure.
    """
    from rl_plugins.rewards.records import Score

    # The object or the agent has a deadline.
    while not (answers := conversations.answers(1.0)):
        pass
    (answer,) = answers.values()
    if isinstance(answer, Score) and answer.failure is not None:
        raise ConfigError(f"{fault}: {answer.failure}: {answer.message}")
    return answer
