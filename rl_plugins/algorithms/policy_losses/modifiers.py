"""What can be combined with any policy loss: sequences to drop, tokens to keep, terms to add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rl_plugins.algorithms.policy_losses.inputs import check_not_negative, check_share, zero_masked
from rl_plugins.algorithms.policy_losses.order_statistics import Gather, largest, own_values


def off_policy_sequence_mask(
    *,
    log_probs_BT: Tensor,
    old_log_probs_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    threshold: float,
) -> Tensor:
    """Off-policy sequence masking: which samples to keep.

    A sample is dropped iff its advantage is negative and the mean of `old_log_probs - log_probs` over its valid
    tokens is above `threshold`: what the policy has already moved away from teaches nothing by being wrong. Multiply
    the loss by it and leave the counts of the aggregation as they are, as the paper does.

    Args:
        log_probs_BT: of the policy that is being updated; no gradient flows.
        old_log_probs_BT: of the policy that sampled, or of the old one.
        advantages_BT: advantage of each token; the sample's is their mean.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.
        threshold: in nats per token.

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
    *, entropy_BT: Tensor, response_mask_BT: Tensor, share: float = 0.2, gather_over_ranks: Gather = own_values
) -> Tensor:
    """Keeps the tokens where the policy had a choice: those at or above the `1 - share` quantile of entropy.

    The quantile is over the N valid tokens of the mini-batch of all ranks, so compute this before the update: it is
    the entropy of rank `1 + floor(share (N - 1))` from above, and equals of it are kept too. Multiply the loss by the
    mask and leave the counts of the aggregation as they are, as the paper does.

    Args:
        entropy_BT: of the policy before the update, in nats.
        response_mask_BT: 1 on tokens that the policy sampled; others may hold anything.
        share: of the valid tokens to keep, about.
        gather_over_ranks: from a vector to those of all ranks in one.

    Returns:
        `response_mask_BT` with 0 on the tokens that are left out, [B, T]. Collective.

    Raises:
        ValueError: `share` is not in (0, 1].

    Source: https://arxiv.org/abs/2506.01939 (the 80/20 rule).
    """
    check_share(share)
    valid_BT = response_mask_BT.bool()
    entropy_BT = entropy_BT.detach()
    num_tokens = int(gather_over_ranks(valid_BT.sum().unsqueeze(0)).sum().item())
    # A product such as 0.29 * 100 falls short of the whole number that is meant.
    kept = 1 + int(share * (num_tokens - 1) + 1e-6)
    top_N = largest(entropy_BT[valid_BT], kept, gather_over_ranks)
    if len(top_N) == 0:
        return response_mask_BT
    return response_mask_BT * (valid_BT & (entropy_BT >= top_N[-1]))


def positive_nll(*, log_probs_BT: Tensor, is_positive_B: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Imitation of the samples that succeeded: `-log_probs` on their valid tokens, 0 elsewhere.

    The paper's term is the mean over the tokens of positive samples: aggregate with the response mask of those
    samples and with its counts. Added to the policy loss as it is, its weight grows with the share of positive samples.

    Args:
        log_probs_BT: of the policy that is being updated, with gradient.
        is_positive_B: bool, the samples to imitate.
        response_mask_BT: 1 on tokens to learn from; others may hold anything.

    Returns:
        Loss [B, T].

    Source: VAPO, https://arxiv.org/abs/2504.05118, the language-model loss on positive examples.
    """
    return -zero_masked(response_mask_BT.bool() & is_positive_B.bool()[:, None], log_probs_BT)[0]


class EntropyController(Protocol):
    """Gives the weight of the entropy bonus and learns from the entropy measured; its state is checkpointed."""

    coefficient: float

    def update(self, measured_entropy: float) -> None:
        """Take in the mean entropy of one RL step."""

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore it."""


@dataclass
class FixedEntropy:
    """A constant weight."""

    coefficient: float

    def update(self, measured_entropy: float) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        """The weight itself."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """A fixed weight belongs to the configuration: keep what was configured."""


@dataclass
class AdaptiveEntropy:
    """Raises the weight by `rate` when the entropy is below its target, lowers it by `rate` when above.

    The paper also takes the bonus out of the loss while the entropy is above its target; here the weight falls step
    by step to `minimum`.

    Attributes:
        coefficient: where it starts, then the weight that was reached.
        target: entropy in nats per token.
        rate: step of the weight.
        minimum: the weight never falls below.
        maximum: nor rises above.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, adaptive entropy control.
    """

    coefficient: float
    target: float
    rate: float = 0.005
    minimum: float = 0.0
    maximum: float = 1.0

    def __post_init__(self) -> None:
        """Check the range.

        Raises:
            ValueError: a negative rate, or a start outside of `minimum` and `maximum`.
        """
        check_not_negative(rate=self.rate)
        if not self.minimum <= self.coefficient <= self.maximum:
            raise ValueError(
                f"coefficient={self.coefficient}: must be from minimum={self.minimum} to maximum={self.maximum}"
            )

    def update(self, measured_entropy: float) -> None:
        """`coefficient +- rate`, within `minimum` and `maximum`; exactly on target it stays."""
        direction = (measured_entropy < self.target) - (measured_entropy > self.target)
        self.coefficient = max(self.minimum, min(self.maximum, self.coefficient + direction * self.rate))

    def state_dict(self) -> dict[str, float]:
        """The weight that was reached."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the weight that was reached, as far as the configured range allows."""
        self.coefficient = max(self.minimum, min(self.maximum, state["coefficient"]))
