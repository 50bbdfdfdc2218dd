"""Losses of reward models: the better response of a pair scores higher, or every step is right or wrong.

A loss depends on its own pair or token only, so its gradient does not depend on the split into micro-batches; the
caller averages losses and metrics over the pairs (or labelled tokens) of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from rl_plugins.algorithms.registry import Registry
from rl_plugins.config.settings import NOT_NEGATIVE, check_ranges

RewardModelLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def bradley_terry(
    *,
    chosen_scores_B: Tensor,
    rejected_scores_B: Tensor,
    margins_B: Tensor | None = None,
    centering: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Higher score for the better response of a pair: `-log sigmoid(r_chosen - r_rejected - margin)`.

    Only differences of scores are learnt; the term `centering (r_chosen + r_rejected)^2` keeps the mean of the scores
    near 0.

    When: pairs of a better and a worse response exist, and no rule can score a response.

    Args:
        chosen_scores_B: score of the better response of each pair, with gradient.
        rejected_scores_B: score of the worse response of each pair, with gradient.
        margins_B: wanted lead of the better response, in units of the scores; None for 0.
        centering: weight of the squared sum of the two scores; 0.01 is usual.

    Returns:
        Loss [B], and the metrics `accuracy` (a tie is wrong), `margin` (the difference of the scores), `chosen_reward`
        and `rejected_reward` [B].

    Raises:
        ValueError: `centering` is below 0.

    Source: InstructGPT https://arxiv.org/abs/2203.02155; the margin Llama 2 https://arxiv.org/abs/2307.09288;
    centering https://arxiv.org/abs/2312.09244 in the form of https://huggingface.co/docs/trl/reward_trainer.
    """
    check_ranges(float, NOT_NEGATIVE, centering=centering)
    difference_B = chosen_scores_B - rejected_scores_B
    loss_B = -logsigmoid(difference_B if margins_B is None else difference_B - margins_B)
    if centering:
        loss_B = loss_B + centering * (chosen_scores_B + rejected_scores_B).square()
    return loss_B, {
        "accuracy": (difference_B > 0).float(),
        "margin": difference_B.detach(),
        "chosen_reward": chosen_scores_B.detach(),
        "rejected_reward": rejected_scores_B.detach(),
    }


def process_reward_loss(
    *, scores_BT: Tensor, labels_BT: Tensor, label_mask_BT: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Classification of each step as right or wrong: binary cross-entropy of `sigmoid(score)`.

    The score of a step is the score at the token that ends the step.

    When: the steps of responses have labels, and the position of an error in a response matters.

    Args:
        scores_BT: score at each response token, with gradient.
        labels_BT: label of the step that ends here: 1 if right, 0 if wrong, between 0 and 1 if uncertain.
        label_mask_BT: 1 on labelled tokens; at 0, scores and labels may hold anything.

    Returns:
        Loss [B, T], 0 without a label, and the metrics `reward` (`sigmoid(score)`, the probability of a right step) and
        `accuracy` (1 if probability and label are on the same side of one half, else 0) [B, T].

    Source: Math-Shepherd https://arxiv.org/abs/2312.08935.
    """
    labelled_BT = label_mask_BT.bool()
    scores_BT, labels_BT = torch.where(labelled_BT, scores_BT, 0), torch.where(labelled_BT, labels_BT, 0)
    loss_BT = binary_cross_entropy_with_logits(scores_BT, labels_BT.to(scores_BT), reduction="none")
    is_right_BT = torch.where(labels_BT > 0.5, scores_BT > 0, scores_BT < 0)
    return torch.where(labelled_BT, loss_BT, 0), {
        "accuracy": is_right_BT.float(),
        "reward": scores_BT.detach().sigmoid(),
    }


REWARD_MODEL_LOSSES: Registry[RewardModelLoss] = Registry(
    "rl_plugins.reward_model_losses", {"bradley_terry": bradley_terry, "process_reward": process_reward_loss}
)
