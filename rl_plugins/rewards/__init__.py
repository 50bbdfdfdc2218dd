"""Rewards: plain callables named in the configuration. A failure is recorded, and its sample is left out."""

from rl_plugins.errors import RewardError
from rl_plugins.rewards.calling import check_routes
from rl_plugins.rewards.inline import InlineScorer
from rl_plugins.rewards.judge_server import JudgeServer, NoAnswer, RequestLimits
from rl_plugins.rewards.pool import RewardPool
from rl_plugins.rewards.records import Score, ScoringRequest, check_failure_rate, failure_counts
from rl_plugins.rewards.trial import check_reward

__all__ = [
    "InlineScorer",
    "JudgeServer",
    "NoAnswer",
    "RequestLimits",
    "RewardError",
    "RewardPool",
    "Score",
    "ScoringRequest",
    "check_failure_rate",
    "check_reward",
    "check_routes",
    "failure_counts",
]
