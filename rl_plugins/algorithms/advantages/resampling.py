"""Policy filtration: train on samples drawn by how much their reward can be trusted.

Drawing is about the whole batch, so pass the rewards of all ranks (gathered): with generators of one seed every rank
draws the same samples, and takes its part of them. A sample drawn twice is trained on twice, so groups are torn: for
advantages that need none (`gae`).

Source: PF-PPO, https://arxiv.org/abs/2409.06957.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_NEVER_ZERO = 1e-8
_WEIGHT_OF_BEST, _WEIGHT_OF_OTHERS = 0.4, 0.1


@dataclass(frozen=True)
class Resampling:
    """How the samples to train on are drawn; see `resampling_weights`.

    Attributes:
        kind: which weights.
        power: exponent of `power`.
    """

    kind: Literal["power", "extremes", "best"] = "power"
    power: float = 2.0


def resampling_weights(
    *,
    rewards_B: Tensor,
    valid_B: Tensor | None = None,
    kind: Literal["power", "extremes", "best"] = "power",
    power: float = 2.0,
) -> Tensor:
    """How likely each sample is to be drawn, up to a common factor.

    | kind | weight |
    |---|---|
    | power | abs(R)^power |
    | extremes | 1 for the largest and the smallest reward of the batch, else 0 |
    | best | 0.4 for the largest reward of the batch, else 0.1 |

    1e-8 is added to each, so that a batch of zeros is drawn from evenly.

    Args:
        rewards_B: rewards of the samples of all ranks.
        valid_B: False for samples that must not be drawn; their rewards may hold anything.
        kind: which weights.
        power: exponent of `power`.

    Returns:
        Weights [B], at least 0; 0 exactly for invalid samples.

    Raises:
        ValueError: an unknown kind, or a negative power.
    """
    if kind not in ("power", "extremes", "best"):
        raise ValueError(f"kind={kind!r}: use 'power', 'extremes' or 'best'")
    if power < 0:
        raise ValueError(f"power={power}: use 0 or more")
    valid_B = torch.ones_like(rewards_B, dtype=torch.bool) if valid_B is None else valid_B
    rewards_B = torch.where(valid_B, rewards_B, 0)
    if not valid_B.any():
        return torch.zeros_like(rewards_B)
    is_largest_B = rewards_B == rewards_B[valid_B].max()
    if kind == "power":
        weights_B = rewards_B.abs() ** power
    elif kind == "extremes":
        weights_B = (is_largest_B | (rewards_B == rewards_B[valid_B].min())).to(rewards_B.dtype)
    else:
        weights_B = torch.full_like(rewards_B, _WEIGHT_OF_OTHERS).masked_fill(is_largest_B, _WEIGHT_OF_BEST)
    return torch.where(valid_B, weights_B + _NEVER_ZERO, 0)


def resample(*, weights_B: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """As many samples as there are, drawn with replacement, with probability proportional to their weight.

    Args:
        weights_B: of `resampling_weights`.
        generator: on the device of the weights; None is the global one.

    Returns:
        Indices, int64 [B].

    Raises:
        ValueError: every weight is 0, because no sample is valid.
    """
    if not len(weights_B):
        return torch.empty(0, dtype=torch.long, device=weights_B.device)
    if not (weights_B > 0).any():
        raise ValueError("no sample can be drawn: every weight is 0, so no sample is valid; skip this batch")
    return torch.multinomial(weights_B.double(), len(weights_B), replacement=True, generator=generator)
