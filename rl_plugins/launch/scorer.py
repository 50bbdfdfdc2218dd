"""Scorer of a run, from the options of the reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_plugins.config.judge import with_engines
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.pool import RewardPool

# Ray may take a minute for a new process on a busy machine.
_START_S = 120.0


def scorer_of(config: RecipeConfig, judge_urls: Sequence[str] = ()) -> RewardPool | InlineScorer | None:
    """Return the scorer of a run: reward workers, or this process with reward.num_workers=0.

    None without samples, and with an environment that returns the rewards.

    Args:
        config: options of the run.
        judge_urls: addresses of the run's engines of a judge.
    """
    if not config.scores or config.environment.scores_itself:
        return None
    reward = config.reward
    options: dict[str, Any] = {"deadline_s": reward.deadline_s, "max_failure_rate": reward.max_failure_rate}
    rewards = with_engines(config.rewards, judge_urls, reward.judge.model)
    if not reward.num_workers:
        return InlineScorer(rewards, **options)
    return RewardPool(
        rewards,
        num_workers=reward.num_workers,
        start_timeout_s=_START_S + reward.load_timeout_s,
        gpus_per_worker=reward.gpus,
        memory_mb=reward.memory_mb,
        pass_env=reward.pass_env,
        **options,
    )
