"""Stateful environment of a recipe, and its trial before anything heavy starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_plugins.data.parquet import Row
    from rl_plugins.environments.stateful import StatefulEnvironment


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
    if options.tools:
        raise ConfigError("environment.stateful and environment.tools: an environment is one of the two: leave one out")
    if config.reward.functions:
        raise ConfigError(
            "reward: a stateful environment scores its conversations by itself: choose reward=environment, and let the "
            "environment return the reward"
        )
    from rl_plugins.environments.stateful import StatefulEnvironment

    return StatefulEnvironment(
        options.stateful,
        max_turns=options.max_turns,
        max_objects=options.max_objects,
        deadline_s=options.deadline_s,
        load_timeout_s=options.load_timeout_s,
        memory_mb=options.memory_mb,
        pass_env=options.pass_env,
        max_observation_tokens=options.max_observation_tokens,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_failure_rate=config.reward.max_failure_rate,
        template_options=config.data.chat_template_kwargs,
    )


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
    from rl_plugins.rewards.records import ScoringRequest

    environment = stateful_environment(config)
    if environment is None:
        return
    try:
        if tokenizer is None:
            return
        for source, row in first_of_source.items():
            ground_truth = row["reward_model"].get("ground_truth")
            environment.try_out(ScoringRequest(source, "", ground_truth, row["extra_info"], row["prompt"]), tokenizer)
    finally:
        environment.close()
