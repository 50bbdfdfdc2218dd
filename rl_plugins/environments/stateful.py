"""Stateful environments: `StatefulEnvironment(Game)`, with an object of a user's class for each conversation.

The object starts the conversation with its first messages, answers each response of the policy, rewards turns, and
scores the conversation. The reward of a conversation is the sum of all rewards. An object that raises, hangs or dies is
a failed reward of its own conversation, which is counted by kind and left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.config.data import DataConfig
from rl_plugins.config.models import RewardConfig
from rl_plugins.config.sampling import EnvironmentOptions
from rl_plugins.environments.object_host import ObjectHost
from rl_plugins.environments.object_process import ObjectTask
from rl_plugins.rewards.limits import WorkerLimits
from rl_plugins.rewards.loading import plain


class StatefulEnvironment:
    """Class of the user, with an object in a process of its own for each conversation.

    The class has three coroutine functions:

    - `reset(row)` returns the first messages to the policy, which take the place of the row's prompt. The row has
      `prompt`, `data_source`, `ground_truth`, `extra_info` and `seed`, which is equal for all samples of a group.
    - `step(message)` takes a message of the policy, and returns messages to the policy, a final score, or a
      `StepResult` with messages and rewards.
    - `close()` releases all resources.

    A fourth, `score()`, is optional. It returns the final score of a conversation that ends without one, because the
    policy may not respond again.

    Example:
        class Guess:
            async def reset(self, row):
                self.number = row["ground_truth"]
                return "Guess my number."

            async def step(self, message):
                if message["content"] == self.number:
                    return 1.0
                return rl.StepResult("No.", reward=-0.1)

            async def close(self):
                pass

        stage = rl.PolicyOptimization(..., environment=rl.StatefulEnvironment(Guess))

    Args:
        environment: the class; its dotted name; or a mapping: `_target_`, or `path` and `name`, and the arguments of
            the constructor.
        max_turns: largest number of responses of the policy in a conversation.
        max_objects: largest number of objects at once; further conversations wait.
        deadline_s: seconds for one call of a method.
        load_timeout_s: seconds for loading the class.
        memory_mb: memory of an object, in MiB, beyond the loaded class; None is half of the free memory.
        pass_env: names of environment variables with secrets for the objects.
        max_observation_tokens: largest number of tokens of the texts of one answer; a longer text is cut at the end.
        max_prompt_tokens: largest number of tokens of the first messages.
        max_failure_rate: share of failed conversations above which the run ends.
        template_options: further variables of the chat template.

    Attributes:
        host: processes of the objects.

    Raises:
        ConfigError: an option is out of range, or the class cannot be loaded or is no stateful environment.
    """

    def __init__(
        self,
        environment: type | str | Mapping[str, Any],
        *,
        max_turns: int = 8,
        max_objects: int = 64,
        deadline_s: float = 10.0,
        load_timeout_s: float = 30.0,
        memory_mb: int | None = None,
        pass_env: Sequence[str] = (),
        max_observation_tokens: int = 256,
        max_prompt_tokens: int = 512,
        max_failure_rate: float = RewardConfig.max_failure_rate,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        EnvironmentOptions.check_fields(
            max_turns=max_turns,
            max_objects=max_objects,
            max_observation_tokens=max_observation_tokens,
            deadline_s=deadline_s,
            load_timeout_s=load_timeout_s,
        )
        DataConfig.check_fields(max_prompt_tokens=max_prompt_tokens)
        RewardConfig.check_fields(max_failure_rate=max_failure_rate)
        self.max_turns, self.max_failure_rate = max_turns, max_failure_rate
        self.max_observation_tokens, self.max_prompt_tokens = max_observation_tokens, max_prompt_tokens
        self.template_options = dict(template_options or {})
        limits = WorkerLimits.of(pass_env, memory_mb, option="pass_env")
        config = plain(environment) if isinstance(environment, Mapping) else {"_target_": environment}
        self.host = ObjectHost(ObjectTask(config, limits, deadline_s), max_objects, load_timeout_s)

    def close(self) -> None:
        """Close all objects, and end all processes."""
        self.host.close()
