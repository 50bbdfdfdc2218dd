"""Environments of Gymnasium in words: observations become texts, and responses become actions.

environment=stateful 'environment.stateful={_target_: rl_plugins.environments.gymnasium_text.GymnasiumText, env:
    FrozenLake-v1, to_text: my_game.describe, options: {is_slippery: false}}'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rl_plugins.environments.step_result import StepResult
from rl_plugins.environments.text_adapters import first_messages, own_function, seed_of
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.records import Message

try:
    import gymnasium
    from gymnasium.spaces import Discrete, Text
except ImportError:
    raise ConfigError("GymnasiumText needs the package gymnasium: pip install 'rl-plugins[gymnasium]'") from None

# `int` refuses numbers of thousands of digits.
_INTEGER = re.compile(r"(?<![\w.])-?\d{1,18}(?![\w]|\.\d)")


class GymnasiumText:
    """Stateful environment around an environment of Gymnasium.

    The first message of the policy is the prompt of the row with the first observation. The seed of the reset is `seed`
    of the row's `extra_info`, or else the seed of the group. The rewards of Gymnasium are the rewards of the turns.

    Args:
        env: name for `gymnasium.make`.
        to_text: function, or its dotted name, from an observation to a text. By default the text of `render()` with
            `options: {render_mode: ansi}`, and else `str`.
        to_action: function, or its dotted name, from the text of a response to an action, or None without an action. By
            default the last whole number of the response for a discrete space, and the whole response for a space of
            texts.
        no_action: text for the policy after a response without an action. The environment takes no step.
        no_action_reward: reward of a turn without an action.
        options: further arguments of `gymnasium.make`.

    Raises:
        ConfigError: the space of actions has no default for `to_action`.
    """

    def __init__(
        self,
        env: str,
        *,
        to_text: Callable[[Any], str] | str | None = None,
        to_action: Callable[[str], Any] | str | None = None,
        no_action: str = "There is no action in this answer.",
        no_action_reward: float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._env: Any = gymnasium.make(env, **(options or {}))
        self._to_text = own_function(to_text) or self._rendered
        self._to_action = own_function(to_action) or _default_action(env, self._env.action_space)
        self._no_action, self._no_action_reward = no_action, no_action_reward

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Start an episode; return the prompt with the first observation."""
        observation, _ = self._env.reset(seed=seed_of(row))
        return first_messages(row, self._to_text(observation))

    async def step(self, message: Message) -> StepResult:
        """Take the action of a response."""
        action = self._to_action(str(message["content"]))
        if action is None:
            return StepResult(self._no_action, reward=self._no_action_reward)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        text = self._to_text(observation)
        if terminated or truncated:
            return StepResult(text, score=float(reward))
        return StepResult(text, reward=float(reward))

    async def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _rendered(self, observation: object) -> str:
        return str(self._env.render() if self._env.render_mode == "ansi" else observation)


def _default_action(env: str, space: object) -> Callable[[str], Any]:
    if isinstance(space, Text):
        return str
    if not isinstance(space, Discrete):
        raise ConfigError(
            f"env={env!r} has actions of the space {space}: give to_action, a function from text to action"
        )

    def number(text: str) -> int | None:
        found = _INTEGER.findall(text)
        return int(found[-1]) if found and space.contains(int(found[-1])) else None

    return number
