"""Policy losses: one term per token, [B, T], to be aggregated by `aggregation.aggregate`.

A loss returns the loss of every token and a dictionary of metrics per token, [B, T]; the caller averages the metrics
over valid tokens. A loss depends on the sample's own row only, so its gradient does not depend on the split into
micro-batches. A statistic of the mini-batch is computed before the update, by a function of `SELECTIONS`, and passed
to the loss as an input. `modifiers` can be combined with any loss; `rl_plugins.algorithms.inputs` describes the inputs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rl_plugins.algorithms.policy_losses.clipped import MAX_LOG_RATIO, cispo, gmpo, gspo, ppo_clip, reinforce
from rl_plugins.algorithms.policy_losses.covariance import clip_cov, kl_cov, select_largest, select_within_band
from rl_plugins.algorithms.policy_losses.distillation import forward_kl_top_k
from rl_plugins.algorithms.policy_losses.trust_region import dppo_kl, dppo_tv, dro, sapo, vespo
from rl_plugins.algorithms.registry import Registry

__all__ = ["MAX_LOG_RATIO", "POLICY_LOSSES", "SELECTIONS", "WITH_RATIO", "PolicyLoss", "Selection", "ppo_clip"]

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
Selection = Callable[..., Tensor]

_OWN: dict[str, PolicyLoss] = {
    "cispo": cispo,
    "clip_cov": clip_cov,
    "dppo_kl": dppo_kl,
    "dppo_tv": dppo_tv,
    "dro": dro,
    "forward_kl_top_k": forward_kl_top_k,
    "gmpo": gmpo,
    "gpg": reinforce,
    "gspo": gspo,
    "kl_cov": kl_cov,
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
    "sapo": sapo,
    "vespo": vespo,
}

POLICY_LOSSES: Registry[PolicyLoss] = Registry("rl_plugins.policy_losses", _OWN)

WITH_RATIO = frozenset(_OWN.values()) - {reinforce}
"""Losses that multiply by the ratio of the current to the old policy."""

SELECTIONS: dict[str, Selection] = {"clip_cov": select_within_band, "kl_cov": select_largest}
"""Functions that compute `selected_BT` for a policy loss, once for each mini-batch of all ranks."""
