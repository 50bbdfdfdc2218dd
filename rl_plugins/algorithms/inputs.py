"""Inputs of the algorithm functions: one description of each tensor, and calls by argument name.

Advantage estimators, losses and selections take keyword arguments. The name of an argument states which tensor the
function needs, and its last capitals are the axes. `INPUTS` describes each name once; a docstring describes a tensor
only where its meaning differs. The stage computes every input without a default (`required_inputs`). An input with a
default is passed if it is available (`call_with`). Log-probabilities and entropies are in nats.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor

from rl_plugins.errors import ConfigError

R = TypeVar("R")

Collective = Callable[[Tensor], Tensor]
"""A function of this rank's tensor that every rank must call, and that returns the same result on all ranks."""


def one_rank(values: Tensor) -> Tensor:
    """Return the tensor itself: the sum, maximum or concatenation over a single rank."""
    return values


INPUTS: dict[str, str] = {
    # Samples
    "response_mask_BT": (
        "1 on tokens that the policy sampled, 0 on padding, on observations and on tokens rejected by a rollout "
        "correction; at 0, other tensors may hold anything."
    ),
    "response_lengths_B": "number of tokens in each response.",
    "groups_B": "number of the prompt that each sample answers; all samples of a group are on one rank.",
    "valid_B": "False for samples to leave out, because their reward failed.",
    "truncated_B": "True for responses cut off at the length limit.",
    "ids_B": "int64 id of each sample, unique in the mini-batch of all ranks.",
    # Rewards
    "scores_B": "score of each sample by the reward function; 0 if the reward failed (then `valid_B` is False).",
    "token_level_rewards_BT": (
        "reward of each token: the rewards of tokens and of turns (`token_level_scores_BT`), and the rest of the score "
        "on the last sampled token (on the first position without one); minus the penalty of a KL term placed in the "
        "reward."
    ),
    "baseline_rewards_B": "reward of a greedy response to the prompt of each sample.",
    "costs_B": "cost of each sample, for a bound on the mean cost (`Algorithm.constraint`).",
    "component_rewards_BK": "K rewards of each sample, the numbers named in `Algorithm.reward_components`.",
    "token_level_scores_BT": (
        "score of each sample by the reward function, the environment or the agent, before shaping, divided among the "
        "tokens: rewards of tokens, or rewards of turns on their last tokens, and the rest of the score on the last "
        "sampled token."
    ),
    "turns_BT": "int64 number of the turn of each token in its conversation, from 0.",
    "states_BT": (
        "int64 number of the state in which the turn of each token begins: equal for equal messages of the environment "
        "before the turn, and in the first turn for equal prompts."
    ),
    "process_rewards_BT": "reward of each token by a process reward model (`implicit_process_reward`).",
    "outcomes_B": "outcome of each sample, from 0 (failure) to 1 (success).",
    # Log-probabilities of the sampled tokens
    "log_probs_BT": "log-probability of each token under the policy that is being updated, with gradient.",
    "old_log_probs_BT": (
        "log-probability of each token under the policy before the update, the denominator of the ratio; with a bypass "
        "correction or stale samples, policy losses get the log-probability under the policy that sampled."
    ),
    "rollout_log_probs_BT": "log-probability of each token as computed by the rollout engine that sampled the token.",
    "ref_log_probs_BT": "log-probability of each token under the frozen reference.",
    "teacher_log_probs_BT": (
        "log-probability of each token under the teacher, or the weighted sum of the log-probabilities under several."
    ),
    "teacher_top_log_probs_BTK": "the teacher's log-probabilities of its K most likely tokens at each position.",
    "teacher_top_weights_BTK": "weight of the teacher of each of the K tokens; None for one teacher.",
    "top_log_probs_BTK": "the policy's log-probabilities of the same K tokens, with gradient.",
    "reference_log_probs_BT": "log-probability of each token under the frozen reference of the process reward model.",
    # Distributions at each position
    "entropy_BT": "entropy of the policy at each position, in nats.",
    "sum_pi_squared_BT": "sum of the squared probabilities of the vocabulary at each position, before the update.",
    # Update
    "advantages_BT": "advantage of each token.",
    "cost_advantages_BT": "advantage of each token for the costs.",
    "values_BT": "the critic's estimate of the return before each token.",
    "cost_values_BT": "the cost critic's estimate of the sum of the later costs before each token.",
    "old_values_BT": "values of the critic before the update.",
    "returns_BT": "returns, the targets of the values.",
    "rollout_weights_BT": "importance weight of each token, from the rollout engine to the policy before the update.",
    "loss_mask_BT": "0 on the tokens without a policy loss (`top_entropy`); means still count such tokens.",
    "selected_BT": "bool, True on the tokens chosen by the selection of the policy loss (`SELECTIONS`).",
    # Preference pairs and single responses: log-probabilities are sums over the tokens of a response
    "chosen_log_probs_N": "log-probability of the better response under the policy, with gradient.",
    "rejected_log_probs_N": "log-probability of the worse response under the policy, with gradient.",
    "ref_chosen_log_probs_N": "log-probability of the better response under the reference.",
    "ref_rejected_log_probs_N": "log-probability of the worse response under the reference.",
    "chosen_lengths_N": "number of tokens in the better response.",
    "rejected_lengths_N": "number of tokens in the worse response.",
    "log_probs_N": "log-probability of each response under the policy, with gradient.",
    "ref_log_probs_N": "log-probability of each response under the reference.",
    # Communication
    "sum_over_ranks": "function that returns the element-wise sum of a tensor over all ranks.",
    "max_over_ranks": "function that returns the element-wise maximum of a tensor over all ranks.",
    "gather_over_ranks": (
        "function that concatenates the vectors of all ranks; the length of the vector may differ between ranks."
    ),
}
"""Meaning of every input that more than one function takes, or that the stage computes for a function."""

ALWAYS_GIVEN_TO_ADVANTAGES = frozenset({
    "token_level_rewards_BT", "scores_B", "response_mask_BT", "response_lengths_B", "groups_B", "valid_B",
    "rollout_log_probs_BT", "token_level_scores_BT", "sum_over_ranks",
})  # fmt: skip
COMPUTED_FOR_ADVANTAGES = frozenset({
    "old_log_probs_BT", "ref_log_probs_BT", "teacher_log_probs_BT", "entropy_BT", "sum_pi_squared_BT", "values_BT",
    "baseline_rewards_B", "component_rewards_BK", "process_rewards_BT", "rollout_weights_BT", "turns_BT", "states_BT",
})  # fmt: skip
OF_REWARDS_ONLY = frozenset({
    "baseline_rewards_B", "component_rewards_BK", "process_rewards_BT", "token_level_scores_BT", "teacher_log_probs_BT",
})  # fmt: skip
"""Inputs of advantage estimators without a counterpart for costs."""
ALWAYS_GIVEN_TO_LOSSES = frozenset({
    "log_probs_BT", "old_log_probs_BT", "rollout_log_probs_BT", "advantages_BT", "response_mask_BT", "entropy_BT",
})  # fmt: skip
COMPUTED_FOR_LOSSES = frozenset({
    "ref_log_probs_BT", "teacher_log_probs_BT", "teacher_top_log_probs_BTK", "teacher_top_weights_BTK",
    "top_log_probs_BTK", "selected_BT",
})  # fmt: skip
"""Inputs of advantage estimators and policy losses: always given, or computed only for a function that needs them."""

PAIR_INPUTS = frozenset({
    "chosen_log_probs_N", "rejected_log_probs_N", "ref_chosen_log_probs_N", "ref_rejected_log_probs_N",
    "chosen_lengths_N", "rejected_lengths_N", "margins_N",
})  # fmt: skip
JUDGED_INPUTS = frozenset({"log_probs_N", "ref_log_probs_N", "lengths_N", "desirable_N", "reference_point"})
SCORED_PAIR_INPUTS = frozenset({"chosen_scores_B", "rejected_scores_B", "margins_B"})
SCORED_STEP_INPUTS = frozenset({"scores_BT", "labels_BT", "label_mask_BT"})
"""Inputs of losses of preferences and of reward models, by the kind of the data."""


def required_inputs(function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """List the arguments that have neither a default nor an option."""
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        and parameter.name not in options
    ]


def takes_pairs(loss: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Return True if a preference loss compares the two responses of a pair."""
    return PAIR_INPUTS.issuperset(required_inputs(loss, options))


def check_inputs(loss: Callable[..., Any], options: Mapping[str, Any], given: Collection[str], data: str) -> None:
    """Check that the data gives the inputs of a loss of preferences or of a reward model.

    Args:
        loss: the loss.
        options: keyword arguments of the loss.
        given: names of the inputs that the data gives.
        data: name of the data, for the message.

    Raises:
        ConfigError: an input is missing.
    """
    if JUDGED_INPUTS.issuperset(given) and takes_pairs(loss, options):
        raise ConfigError(
            f"the loss {loss.__name__} takes pairs, and the data has single responses with labels: leave label_key "
            "out, or use the loss kto (loss.name=kto in a recipe)"
        )
    if missing := [name for name in required_inputs(loss, options) if name not in given]:
        raise ConfigError(
            f"the loss {loss.__name__} needs {missing[0]}, and {data} has only {', '.join(sorted(given))}: choose a "
            "loss that fits the data"
        )


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return True if a function takes a keyword argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def call_with(function: Callable[..., R], inputs: Mapping[str, Any], options: Mapping[str, Any]) -> R:
    """Call a function with its options, and with the inputs that its signature names.

    Args:
        function: function to call; a function with `**kwargs` receives all inputs.
        inputs: available inputs by name; an input that is None is not passed.
        options: keyword arguments from the configuration; an option replaces an input of the same name.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {name: value for name, value in inputs.items() if value is not None and (takes_any or name in parameters)}
    return function(**{**given, **options})
