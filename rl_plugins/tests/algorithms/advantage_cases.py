"""Every advantage estimator, with inputs for every special case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.tests.algorithms.batches import make_batch

Inputs = dict[str, Any]

# Name of the case -> estimator, options, inputs beyond rewards, mask, groups and valid.
CASES: dict[str, tuple[str, Mapping[str, Any], tuple[str, ...]]] = {
    "grpo": ("grpo", {}, ()),
    "grpo, batch": ("grpo", {"scale": "batch"}, ()),
    "grpo, none": ("grpo", {"scale": "none"}, ()),
    "grpo_passk": ("grpo_passk", {}, ()),
    "grpo_passk, plain": ("grpo_passk", {"normalize": False}, ()),
    "rloo": ("rloo", {}, ()),
    "opo": ("opo", {}, ()),
    "gpg": ("gpg", {"norm": 2.0}, ()),
    "max_rl": ("max_rl", {}, ()),
    "best_of_n": ("best_of_n", {"keep": 2}, ()),
    "best_of_n, threshold": ("best_of_n", {"keep": None, "above": 0.0}, ()),
    "gdpo": ("gdpo", {}, ()),
    "gdpo, plain": ("gdpo", {"normalize": False}, ("component_rewards_BK",)),
    "gdpo, components": ("gdpo", {"weights": [1.0, 0.5]}, ("component_rewards_BK",)),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}, ()),
    "reinforce_plus_plus, discounted": ("reinforce_plus_plus", {"gamma": 0.9}, ()),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}, ()),
    "remax": ("remax", {}, ("baseline_rewards_B",)),
    "gae": ("gae", {"gamma": 0.99, "lam": 0.95}, ("values_BT",)),
    "gae, plain": ("gae", {"gamma": 0.99, "lam": 0.95, "normalize": False}, ("values_BT",)),
    "prime": ("prime", {}, ("process_rewards_BT",)),
    "reverse_kl": ("reverse_kl", {"bound": 0.5}, ("old_log_probs_BT", "teacher_log_probs_BT")),
    "reverse_kl, reward": ("reverse_kl", {"reward_weight": 0.3}, ("old_log_probs_BT", "teacher_log_probs_BT")),
    "optimal_token_baseline": ("optimal_token_baseline", {}, ("old_log_probs_BT", "sum_pi_squared_BT")),
    "optimal_token_baseline, tail": (
        "optimal_token_baseline",
        {"zero_tail": False},
        ("old_log_probs_BT", "sum_pi_squared_BT", "rollout_weights_BT"),
    ),
    "tir_optimal_token_baseline": (
        "tir_optimal_token_baseline",
        {},
        ("old_log_probs_BT", "sum_pi_squared_BT", "rollout_weights_BT"),
    ),
    "gigpo": ("gigpo", {}, ("turns_BT", "states_BT")),
    "gigpo, none": ("gigpo", {"scale": "none", "turn_weight": 0.5}, ("turns_BT", "states_BT")),
    "mt_grpo": ("mt_grpo", {"outcome_weight": 0.5}, ("turns_BT",)),
    "bilevel_gae": ("bilevel_gae", {"lam": 0.9}, ("values_BT", "turns_BT")),
    "bilevel_gae, plain": ("bilevel_gae", {"turn_lam": 0.8, "normalize": False}, ("values_BT", "turns_BT")),
}

BY_POSITION = {
    "reinforce_plus_plus", "remax", "gae", "optimal_token_baseline", "tir_optimal_token_baseline", "bilevel_gae",
}  # fmt: skip
"""Estimators that ignore rewards at masked positions; the other estimators sum the rewards of all positions."""

OVER_THE_BATCH = {
    "grpo, batch",
    "gpg",
    "best_of_n",
    "best_of_n, threshold",
    "gdpo",
    "gdpo, plain",
    "gdpo, components",
    "reinforce_plus_plus",
    "reinforce_plus_plus, discounted",
    "reinforce_plus_plus_baseline",
    "gae",
    "prime",
    "bilevel_gae",
}
"""Cases with a statistic of the batch of all ranks."""


def make_inputs(case: str, seed: int) -> Inputs:
    """Return float64 inputs. The mask of invalid samples is not empty: only `valid_B` leaves out invalid samples."""
    batch = make_batch(seed)
    invalid = ~batch.valid[:, None]
    mask = torch.where(invalid, (torch.arange(batch.mask.shape[1]) < batch.lengths[:, None]).double(), batch.mask)
    probs = batch.log_probs.exp()
    # Turns of one to five tokens, in two states.
    turns = (batch.old - batch.ref > 0.5).long().cumsum(dim=-1)
    extras = {
        "component_rewards_BK": torch.stack([batch.scores, batch.advantages.sum(dim=-1)], dim=-1),
        "baseline_rewards_B": batch.ref[:, 0],
        "values_BT": batch.ref,
        "process_rewards_BT": batch.ref,
        "old_log_probs_BT": batch.log_probs,
        "teacher_log_probs_BT": batch.old,
        "sum_pi_squared_BT": probs.square() + (1 - probs).square() * batch.advantages.sigmoid(),
        "rollout_weights_BT": (0.3 * batch.advantages).exp(),
        "turns_BT": turns,
        "states_BT": (turns + batch.groups[:, None]) % 2,
    }
    return {
        "token_level_rewards_BT": batch.rewards() + 0.1 * batch.advantages * batch.mask,
        "response_mask_BT": mask,
        "groups_B": batch.groups,
        "valid_B": batch.valid,
        **{name: extras[name] for name in CASES[case][2]},
    }


def estimate(case: str, inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a case."""
    name, own_options, _ = CASES[case]
    return ADVANTAGES[name](**inputs, **own_options, **options)


def select(inputs: Inputs, samples: Tensor) -> Inputs:
    """Return the inputs of these samples only, in this order."""
    return {name: tensor[samples] for name, tensor in inputs.items()}
