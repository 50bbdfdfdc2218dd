"""Policy losses: per-token terms [B, T], to be aggregated by `aggregation.aggregate`.

Each function takes the current, the old and the advantage tensors and returns the loss of every token and a
dictionary of per-token metric tensors [B, T] that the caller averages over valid tokens. A loss depends on nothing
but the sample's own row, so that its gradient does not depend on the split into micro-batches; what needs statistics
of the mini-batch is computed before, by a function of `SELECTIONS`, and passed in. What may be combined with any loss
is in `modifiers`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rl_plugins.algorithms.policy_losses.covariance import clip_cov, kl_cov, select_largest, select_within_band
from rl_plugins.algorithms.policy_losses.distillation import forward_kl_top_k
from rl_plugins.algorithms.policy_losses.dppo import dppo_kl, dppo_tv
from rl_plugins.algorithms.policy_losses.inputs import MAX_LOG_RATIO
from rl_plugins.algorithms.policy_losses.ppo import ppo_clip
from rl_plugins.algorithms.policy_losses.reinforce import cispo, reinforce
from rl_plugins.algorithms.policy_losses.sequence import gmpo, gspo
from rl_plugins.algorithms.policy_losses.soft_trust_region import dro, sapo
from rl_plugins.algorithms.registry import Table

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
}

POLICY_LOSSES: Table[PolicyLoss] = Table("rl_plugins.policy_losses", _OWN)

WITH_RATIO = frozenset(_OWN) - {"gpg", "reinforce"}
"""Those here that multiply by the ratio of the current to the old policy."""

SELECTIONS: dict[str, Selection] = {"clip_cov": select_within_band, "kl_cov": select_largest}
"""For the losses that take `selected_BT`: what computes it, once for each mini-batch of all ranks."""
