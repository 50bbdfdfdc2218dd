"""Comparison of the policy with the sampler (the policies that sampled): when training needs the comparison, and when
sampling allows it."""

from __future__ import annotations

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.sampling import SamplingConfig, Schedule
from rl_plugins.errors import ConfigError


def ratio_to_rollout(algorithm: Algorithm, schedule: Schedule) -> bool:
    """Return True if the loss compares the policy with the sampler.

    Otherwise the loss compares the policy with the policy before the update. The loss uses the sampler if the algorithm
    says so, or if samples are stale and nothing else corrects for the age.
    """
    correction = algorithm.rollout_correction
    return correction.bypass or (schedule.max_staleness > 0 and not correction.decoupled)


def check_comparable(algorithm: Algorithm, schedule: Schedule, sampling: SamplingConfig) -> None:
    """Refuse top-p and top-k sampling if training compares the policy with the sampler.

    Top-p and top-k exclude tokens and give the remaining tokens more probability than the policy does, so importance
    ratios and corrections are wrong.

    Raises:
        ConfigError: training compares the policy with the sampler, and top-p or top-k is set.
    """
    correction = algorithm.rollout_correction
    compared = schedule.max_staleness > 0 or correction.bypass or correction.decoupled
    if (compared or algorithm.modifiers.off_policy_mask is not None) and (sampling.top_p < 1 or sampling.top_k > 0):
        raise ConfigError(
            f"sampling.top_p={sampling.top_p:g}, sampling.top_k={sampling.top_k}: training compares the policy "
            "with the sampler (schedule.max_staleness, algorithm.correction, algorithm.modifiers.off_policy_mask), and "
            "top_p and top_k change the log-probs of the sampler: use top_p=1 and top_k=-1"
        )
