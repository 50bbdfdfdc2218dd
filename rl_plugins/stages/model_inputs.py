"""Models beside the policy: their tensors for an algorithm, and checks of the algorithm against the models of a run."""

from __future__ import annotations

from collections.abc import Collection

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.sampling import Schedule
from rl_plugins.errors import ConfigError

MODEL_INPUTS = {
    "reference": frozenset({"ref_log_probs_BT"}),
    "teacher": frozenset({"teacher_log_probs_BT", "teacher_top_log_probs_BTK"}),
    "critic": frozenset({"values_BT"}),
    "cost_critic": frozenset({"cost_values_BT"}),
    "cost_model": frozenset({"costs_B"}),
    "process_reward_model": frozenset({"process_rewards_BT"}),
}
"""Inputs of algorithms that each model computes, by the name of the model."""
_WAYS_OUT = {
    "reference": "reference model with reference=...",
    "teacher": "teacher with teacher=...",
    "critic": "model that the critic starts from with critic=CriticConfig(path=...)",
    "cost_critic": "model that the cost critic starts from with cost_critic=CriticConfig(path=...)",
    "cost_model": "cost model with cost_model=..., or the number of the reward function with constraint.cost",
    "process_reward_model": "process reward model with process_reward_model=ProcessRewardConfig(path=...)",
}


def check_model_inputs(
    algorithm: Algorithm, schedule: Schedule, *, chosen: Collection[str], available: Collection[str]
) -> None:
    """Compare an algorithm with the models and the schedule of a stage.

    Args:
        algorithm: the algorithm.
        schedule: schedule of the stage.
        chosen: names of the models that the user has chosen for scores, costs or process rewards.
        available: names of the models that the stage can load. Costs of the reward function need no model.

    Raises:
        ConfigError: the algorithm needs a model that is not named, or has no use for a chosen model, or the schedule
            and the oversampling of the algorithm exclude each other.
    """
    group_filter = algorithm.group_filter
    if schedule.active and group_filter is not None and group_filter.oversampling > 1:
        raise ConfigError(
            f"algorithm.group_filter.oversampling={group_filter.oversampling} cannot be combined with "
            "schedule.max_staleness or schedule.ahead, because the schedule already keeps extra groups in flight. "
            "Set algorithm.group_filter.oversampling=1"
        )
    if "process_reward_model" in chosen and not MODEL_INPUTS["process_reward_model"] & algorithm.needs:
        raise ConfigError(
            f"algorithm.advantage={algorithm.advantage!r} does not use process rewards: choose "
            "the advantage prime, or another advantage that takes process_rewards_BT"
        )
    if "reward_model" in chosen and not algorithm.reads_scores:
        raise ConfigError(
            "advantage=gdpo compares the components of the reward function alone: leave reward_model out, or "
            "choose another advantage"
        )
    constraint = algorithm.constraint
    if "cost_model" in chosen and constraint is None:
        raise ConfigError(
            "the algorithm does not use the costs of cost_model: set algorithm.constraint, or leave cost_model out"
        )
    has_costs = constraint is not None and constraint.cost is not None
    for model, inputs in MODEL_INPUTS.items():
        needed = sorted(inputs & algorithm.needs)
        if needed and model not in available and not (model == "cost_model" and has_costs):
            raise ConfigError(f"the algorithm needs {needed[0]}: name the {_WAYS_OUT[model]}")
