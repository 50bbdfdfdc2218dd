"""Every policy loss, with options for all its branches, on a random batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_plugins.algorithms.policy_losses import POLICY_LOSSES, SELECTIONS
from rl_plugins.tests.algorithms.batches import Batch

OPTIONS: dict[str, dict[str, Any]] = {
    "cispo": {"clip_low": 0.2, "clip_high": 0.3},
    "clip_cov": {},
    "dppo_kl": {"low": 0.05, "high": 0.05, "cap": 2.0},
    "dppo_tv": {"low": 0.1, "high": 0.2, "cap": 2.0},
    "dro": {"beta": 0.5},
    "forward_kl_top_k": {"policy_weight": 1.0, "loss_max_clamp": 2.0},
    "gmpo": {},
    "gpg": {},
    "gspo": {"clip_low": 0.1, "clip_high": 0.2},
    "kl_cov": {"coefficient": 0.3},
    "ppo_clip": {},
    "reinforce": {},
    "sapo": {},
    "vespo": {"k_positive": 1.5, "lambda_negative": 0.5},
}


def loss_of(
    name: str, batch: Batch, log_probs_BT: Tensor, rows: slice = slice(None)
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss `name` of some rows of the batch; every third token is a selected one."""
    options = dict(OPTIONS[name])
    if name in SELECTIONS:
        numbers = torch.arange(batch.mask.numel()).reshape(batch.mask.shape)
        options["selected_BT"] = (numbers % 3 == 0)[rows]
    if name == "forward_kl_top_k":
        # Two tokens per position, with probabilities from other tensors of the batch.
        of_teacher, of_policy = (batch.ref, batch.old), (batch.old, batch.log_probs)
        options["teacher_top_log_probs_BTK"] = torch.stack(of_teacher, dim=-1).clamp(max=-0.5)[rows]
        options["top_log_probs_BTK"] = torch.stack(of_policy, dim=-1).clamp(max=-0.5)[rows]
    return POLICY_LOSSES[name](
        log_probs_BT=log_probs_BT[rows],
        old_log_probs_BT=batch.old[rows],
        advantages_BT=batch.advantages[rows],
        response_mask_BT=batch.mask[rows],
        **options,
    )
