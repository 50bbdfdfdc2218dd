"""Modifiers of any policy loss: masks of sequences and tokens, and additional terms."""

from __future__ import annotations

from torch import Tensor

from rl_plugins.algorithms.inputs import Collective, one_rank
from rl_plugins.algorithms.masked import largest, zero_masked
from rl_plugins.config.settings import ABOVE_0_TO_1, check_ranges


def off_policy_sequence_mask(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    threshold: float,
) -> Tensor:
    """Off-policy sequence masking: return which samples to keep.

    A sample is dropped if and only if its advantage is negative and the mean of `old_log_probs - log_probs` over its
    valid tokens is above `threshold`: the policy has already moved away from the sample, so a negative advantage
    teaches nothing. Multiply the loss by the mask and leave the counts of the aggregation unchanged, as the paper does.

    Args:
        log_probs_BT: log-probability of each token under the policy that is being updated; no gradient flows.
        old_log_probs_BT: log-probability of each token under the policy that sampled, or under the old policy.
        advantages_BT: advantage of each token; the advantage of the sample is their mean.
        threshold: largest divergence of a sample with negative advantage, in nats per token.

    Returns:
        Bool [B]; a sample without a valid token is kept.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, section 3.1, eq. 9.
    """
    log_probs_BT, old_log_probs_BT, advantages_BT = zero_masked(
        response_mask_BT, log_probs_BT.detach(), old_log_probs_BT, advantages_BT
    )
    lengths_B = response_mask_BT.sum(dim=-1).clamp(min=1)
    divergence_B = (old_log_probs_BT - log_probs_BT).sum(dim=-1) / lengths_B
    return ~((advantages_BT.sum(dim=-1) < 0) & (divergence_B > threshold))


def top_entropy_mask(
    *, entropy_BT: Tensor, response_mask_BT: Tensor, share: float = 0.2, gather_over_ranks: Collective = one_rank
) -> Tensor:
    """Keep the tokens at or above the `1 - share` quantile of entropy, where the policy had several likely tokens.

    The quantile is over the N valid tokens of the mini-batch of all ranks, so compute the mask before the update. The
    quantile is the entropy of rank `1 + floor(share (N - 1))` from above; tokens with the same entropy are kept, too.
    Multiply the loss by the mask and leave the counts of the aggregation unchanged, as the paper does.

    Args:
        entropy_BT: entropy of the policy before the update, in nats.
        share: share of the valid tokens to keep, above 0 and at most 1.

    Returns:
        `response_mask_BT` with 0 on dropped tokens, [B, T]. Collective.

    Raises:
        ValueError: `share` is not in (0, 1].

    Source: https://arxiv.org/abs/2506.01939 (the 80/20 rule).
    """
    check_ranges(float, ABOVE_0_TO_1, share=share)
    valid_BT = response_mask_BT.bool()
    entropy_BT = entropy_BT.detach()
    num_tokens = int(gather_over_ranks(valid_BT.sum().unsqueeze(0)).sum().item())
    # A product such as 0.29 * 100 is slightly below the intended whole number.
    kept = 1 + int(share * (num_tokens - 1) + 1e-6)
    top_N = largest(entropy_BT[valid_BT], kept, gather_over_ranks)
    if len(top_N) == 0:
        return response_mask_BT
    return response_mask_BT * (valid_BT & (entropy_BT >= top_N[-1]))


def positive_nll(*, log_probs_BT: Tensor, is_positive_B: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Negative log-likelihood of the samples that succeeded: `-log_probs` on their valid tokens, 0 elsewhere.

    The paper's term is the mean over the tokens of positive samples: aggregate with the response mask and the counts of
    the positive samples. If the term is added to the policy loss without this aggregation, its weight grows with the
    share of positive samples.

    Args:
        is_positive_B: bool, True for the samples to imitate.

    Returns:
        Loss [B, T].

    Source: VAPO, https://arxiv.org/abs/2504.05118, the language-model loss on positive examples.
    """
    return -zero_masked(response_mask_BT.bool() & is_positive_B.bool()[:, None], log_probs_BT)[0]
