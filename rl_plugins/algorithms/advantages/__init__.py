"""Advantage estimators: rewards in, advantages and returns out, both [B, T].

Every estimator takes the token-level rewards, the response mask, the group of each sample, the valid samples, and
`sum_over_ranks` for statistics of the whole batch. Further inputs (values, log-probabilities, ...) are named in the
signature of the estimator; `rl_plugins.algorithms.inputs` describes all of them. Samples of one prompt share a group
and a rank. An invalid sample (its reward failed) counts in no statistic and gets advantage 0.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rl_plugins.algorithms.advantages.group_relative import (
    best_of_n,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    max_rl,
    opo,
    rloo,
)
from rl_plugins.algorithms.advantages.returns import (
    gae,
    optimal_token_baseline,
    prime,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reverse_kl,
    tir_optimal_token_baseline,
)
from rl_plugins.algorithms.advantages.turns import bilevel_gae, gigpo, mt_grpo
from rl_plugins.algorithms.registry import Registry

__all__ = ["ADVANTAGES", "AdvantageEstimator", "grpo"]

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]

_OWN: dict[str, AdvantageEstimator] = {
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "max_rl": max_rl,
    "gdpo": gdpo,
    "best_of_n": best_of_n,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": gae,
    "prime": prime,
    "reverse_kl": reverse_kl,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
    "gigpo": gigpo,
    "mt_grpo": mt_grpo,
    "bilevel_gae": bilevel_gae,
}

WITH_GROUPS = frozenset(_OWN.values()) - {gae, bilevel_gae, reinforce_plus_plus, remax, reverse_kl}
"""Estimators of this package that compare the samples of a group. `reverse_kl` does with `reward_weight`."""

ADVANTAGES: Registry[AdvantageEstimator] = Registry("rl_plugins.advantages", _OWN)
