"""Comparison of the policy with the sampler (the policies that sampled): when training needs the comparison, and when
sampling and the replay of routes allow it."""

from __future__ import annotations

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.sampling import SamplingOptions, Schedule
from rl_plugins.errors import ConfigError


def compares_with_sampler(algorithm: Algorithm, schedule: Schedule) -> bool:
    """Return True if the loss compares the policy with the sampler.

    Otherwise the loss compares the policy with the policy before the update. The loss uses the sampler if the algorithm
    says so, or if samples are stale and nothing else corrects for the age.
    """
    correction = algorithm.rollout_correction
    return correction.bypass or (schedule.max_staleness > 0 and not correction.decoupled)


def needs_old_log_probs(algorithm: Algorithm, schedule: Schedule, updates: int) -> bool:
    """Return True if the loss needs the log-probs of the policy before the updates of a step.

    With one update, the policy in the loss is still the policy before the updates.

    Args:
        algorithm: the algorithm.
        schedule: bound on the age of tokens.
        updates: number of optimizer steps of an RL step.
    """
    return updates > 1 and not compares_with_sampler(algorithm, schedule)


def check_comparable(algorithm: Algorithm, schedule: Schedule, sampling: SamplingOptions) -> None:
    """Refuse options that change the sampled distribution if training compares the policy with the sampler.

    Top-p, penalties and others exclude tokens or move probability. The sampler then gives tokens another probability
    than the policy does, so importance ratios and corrections are wrong.

    Raises:
        ConfigError: training compares the policy with the sampler, and an option changes the distribution.
    """
    correction = algorithm.rollout_correction
    compared = schedule.max_staleness > 0 or correction.bypass or correction.decoupled
    if (compared or algorithm.modifiers.off_policy_mask is not None) and sampling.reshaping:
        options = ", ".join(f"sampling.{option}" for option in sampling.reshaping)
        raise ConfigError(
            f"{options}: training compares the policy with the sampler (schedule.max_staleness, algorithm.correction, "
            "algorithm.modifiers.off_policy_mask), and the log-probs of the sampler are after this change of its "
            "distribution: leave the option out"
        )


def check_recomputed_routes(algorithm: Algorithm, schedule: Schedule, updates: int) -> None:
    """Refuse the replay of recomputed routes if no pass over the samples computes old log-probs for the updates.

    Args:
        algorithm: the algorithm.
        schedule: bound on the age of tokens.
        updates: number of optimizer steps of an RL step.

    Raises:
        ConfigError: the loss compares the policy with the sampler, or with itself.
    """
    if compares_with_sampler(algorithm, schedule):
        raise ConfigError(
            "router_replay=recompute: the loss compares the policy with the sampler, not with old log-probs: use "
            "router_replay=rollout, or a decoupled rollout correction"
        )
    if updates == 1:
        raise ConfigError(
            "router_replay=recompute: with one optimizer step, the routes are the same anyway: raise "
            "updates_per_step or passes_per_step, or leave router_replay out"
        )
