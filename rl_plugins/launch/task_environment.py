"""Environment of a recipe (tools, a stateful environment, an agent, or a replying reward function), and its trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.config.sampling import EnvironmentConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.argument_errors import errors_with_options, options_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.data.parquet import Row
    from rl_plugins.environments.agent import AgentEnvironment
    from rl_plugins.environments.stateful import StatefulEnvironment
    from rl_plugins.environments.tools import ToolEnvironment
    from rl_plugins.rewards.conversations import Environment
    from rl_plugins.rewards.trajectory import EnvironmentAnswer
    from rl_plugins.stages.sampling import AnyEnvironment

    TaskEnvironment = ToolEnvironment | StatefulEnvironment | AgentEnvironment

_OF_ALL = ("max_turns", "deadline_s", "load_timeout_s", "memory_mb", "pass_env")
_OF_TOOLS = (*_OF_ALL, "tools", "parser", "max_characters", "left_out")
_OF_OBJECTS = (*_OF_ALL, "max_objects", "max_observation_tokens")
_OF_AGENTS = (*_OF_ALL, "agent", "parser", "max_sequences", "max_objects", "endpoint_host")
_OPTIONS = options_in("environment", {*_OF_TOOLS, *_OF_OBJECTS, *_OF_AGENTS})
# A response without an answer, as an untrained policy may give.
_NO_ANSWER = "?"
_WANTED = {
    "stateful": "a class with async reset, step and close, such as my_package.Game",
    "agent": "a function of a row, a base_url and an api_key, such as my_package.solve",
}
"""Value of the option for each environment with rewards of its own."""


@contextmanager
def open_environment(config: RecipeConfig) -> Iterator[AnyEnvironment]:
    """Start the environment of a recipe, and end its processes at the end.

    Raises:
        ConfigError: the environment cannot be used; see `ToolEnvironment`, `StatefulEnvironment` and
            `AgentEnvironment`.
    """
    environment = task_environment(config)
    if environment is None:
        options = config.environment
        yield EnvironmentConfig(
            options.max_turns, options.max_observation_tokens, template_options=config.data.chat_template_kwargs
        )
        return
    try:
        yield environment
    finally:
        environment.close()


def task_environment(config: RecipeConfig) -> TaskEnvironment | None:
    """Return the environment of the options `environment`; None for a reward function, which may reply.

    Raises:
        ConfigError: the environment cannot be used (see its class), or there is something beside an environment with
            rewards of its own.
    """
    options = config.environment

    def values(names: tuple[str, ...]) -> dict[str, Any]:
        own = {name: getattr(options, name) for name in names}
        return {**own, "template_options": config.data.chat_template_kwargs}

    of_scores: dict[str, Any] = {
        "max_prompt_tokens": config.data.max_prompt_tokens, "max_failure_rate": config.reward.max_failure_rate,
    }  # fmt: skip
    if options.stateful is not None and config.generates:
        _check_alone(config, "stateful", "a stateful environment scores its conversations by itself")
        from rl_plugins.environments.stateful import StatefulEnvironment

        with _errors_with_options():
            return StatefulEnvironment(options.stateful, **values(_OF_OBJECTS), **of_scores)
    if options.agent is not None and config.scores:
        _check_alone(config, "agent", "an agent returns the reward of its trajectory")
        from rl_plugins.environments.agent import AgentEnvironment

        with _errors_with_options():
            return AgentEnvironment(**values(_OF_AGENTS), **of_scores)
    if options.tools and config.generates:
        from rl_plugins.environments.tools import ToolEnvironment

        with _errors_with_options():
            return ToolEnvironment(**values(_OF_TOOLS))
    return None


def try_environment(
    config: RecipeConfig, first_of_source: Mapping[str, Row], tokenizer: PreTrainedTokenizerBase | None
) -> Mapping[str, Any]:
    """Start the environment and try it on a row of each data source; return the variables of the chat template.

    Args:
        config: configuration of the run.
        first_of_source: a row of each data source.
        tokenizer: tokenizer of the policy; None, which leaves out the rows, if the tokenizer is not on this machine.

    Raises:
        ConfigError: the environment cannot be used, does not fit the tokenizer, or fails on a row.
    """
    environment = task_environment(config)
    if environment is None:
        return config.data.chat_template_kwargs
    try:
        if tokenizer is not None:
            _try_out(environment, first_of_source, tokenizer)
        return environment.template_options
    finally:
        environment.close()


def _try_out(
    environment: TaskEnvironment, first_of_source: Mapping[str, Row], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Read the calls of tools, let objects start and answer one response, or let agents make their first call."""
    from rl_plugins.environments.agent import AgentEnvironment
    from rl_plugins.environments.object_conversations import StatefulConversations
    from rl_plugins.environments.tools import ToolEnvironment
    from rl_plugins.rewards.records import scoring_request
    from rl_plugins.rewards.trajectory import Start, Turn

    if isinstance(environment, ToolEnvironment):
        with _errors_with_options():
            environment.check(tokenizer)
        return
    requests = [scoring_request("", row) for row in first_of_source.values()]
    if isinstance(environment, AgentEnvironment):
        with _errors_with_options():
            agents = environment.connect(tokenizer)
        for number, request in enumerate(requests):
            agents.start(number, request, seed=0)
            _answer(agents, f"the agent fails on a row of data_source {request.data_source!r} before its first call")
            agents.forget([number])
        return
    for request in requests:
        objects = StatefulConversations(environment.host, tokenizer, environment)
        fault = f"the environment fails on a row of data_source {request.data_source!r}"
        objects.start(0, request, seed=0)
        answer = _answer(objects, fault)
        if isinstance(answer, Start):
            left, prompt = environment.max_turns - 1, list(answer.messages)
            asked = replace(request, solution_str=_NO_ANSWER, prompt=prompt, turns_left=left)
            objects.begin(0, Turn(asked, answer.tokens, 0))
            _answer(objects, fault)
        # A waiting object would take the place of the next one.
        objects.forget([0])


def _answer(conversations: Environment, fault: str) -> EnvironmentAnswer:
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


def _check_alone(config: RecipeConfig, option: str, reason: str) -> None:
    """Check that there are no tools, no other environment and no reward beside an environment with rewards."""
    if not getattr(config.environment, option):
        raise ConfigError(f"environment.{option}: name {_WANTED[option]}")
    for other in ("tools", "stateful", "agent"):
        if other != option and getattr(config.environment, other) not in (None, []):
            raise ConfigError(
                f"environment.{option} and environment.{other}: an environment is one of the two: leave one out"
            )
    if config.reward.functions:
        raise ConfigError(f"reward: {reason}: choose reward=environment, and let the environment return the reward")


@contextmanager
def _errors_with_options() -> Iterator[None]:
    """Name options in place of the arguments of environments in errors."""
    try:
        with errors_with_options(_OPTIONS):
            yield
    except ConfigError as error:
        preset = ", or environment=tools, which sets 8" if str(error).startswith("environment.max_turns=") else ""
        raise ConfigError(f"{error}{preset}") from None
