"""Advantage estimators: rewards in, advantages and returns out, both [B, T].

Every estimator takes the token-level rewards (the score on the last token, minus a KL penalty if there is
one), the response mask, the group of each sample, which samples are valid, and `sum_over_ranks` for statistics
of the whole batch. Samples of one prompt share a group and a rank. An invalid sample (its reward failed) counts
in no statistic and gets advantage 0. What else an estimator needs (values, log-probs, ...) it names in its
signature. `resampling` is no estimator: it draws which samples to train on.
"""

from __future__ import annotations

from rl_plugins.algorithms.advantages.distillation import reverse_kl
from rl_plugins.algorithms.advantages.gae import gae
from rl_plugins.algorithms.advantages.group_relative import gdpo, gpg, grpo, grpo_passk, max_rl, opo, rloo
from rl_plugins.algorithms.advantages.interface import AdvantageEstimator, one_rank
from rl_plugins.algorithms.advantages.optimal_baseline import optimal_token_baseline, tir_optimal_token_baseline
from rl_plugins.algorithms.advantages.prime import prime
from rl_plugins.algorithms.advantages.returns import reinforce_plus_plus, reinforce_plus_plus_baseline, remax
from rl_plugins.algorithms.registry import Table

__all__ = ["ADVANTAGES", "AdvantageEstimator", "grpo", "one_rank"]

_OWN: dict[str, AdvantageEstimator] = {
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "gpg": gpg,
    "max_rl": max_rl,
    "gdpo": gdpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": gae,
    "prime": prime,
    "reverse_kl": reverse_kl,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}

ADVANTAGES: Table[AdvantageEstimator] = Table("rl_plugins.advantages", _OWN)
