"""What a stage makes of a bare reward: a pool of workers where Ray runs, an inline scorer elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.pool import RewardPool

Reward = Callable[..., Any] | Mapping[str, Any]


def default_scorer(reward: Reward, *, deadline_s: float = 10.0) -> RewardPool | InlineScorer:
    """A scorer for a reward function, or for a reward configuration (see `routing`).

    Args:
        reward: A function that is defined in the script itself is sent to the workers by value; of any other
            they import the module.
        deadline_s: Seconds for one call of the function.

    Raises:
        ConfigError: The function asks for an argument that samples do not have, or cannot be loaded.
    """
    config = reward if isinstance(reward, Mapping) else {"_target_": reward}
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return RewardPool(config, num_workers=1, deadline_s=deadline_s)
    return InlineScorer(config, deadline_s=deadline_s)
