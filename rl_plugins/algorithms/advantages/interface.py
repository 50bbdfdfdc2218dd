"""What the estimators have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AdvantageEstimator = Callable[..., tuple[Tensor, Tensor]]


def one_rank(values: Tensor) -> Tensor:
    """`sum_over_ranks` where there is one rank."""
    return values


def learned_tokens(response_mask_BT: Tensor, valid_B: Tensor) -> Tensor:
    """Tokens that the policy sampled in valid samples, bool [B, T]."""
    return response_mask_BT.bool() & valid_B.unsqueeze(-1)


def on_every_token(advantages_B: Tensor, response_mask_BT: Tensor, valid_B: Tensor) -> Tensor:
    """The advantage of a sample on each token that it learns from, 0 elsewhere, [B, T]."""
    return torch.where(learned_tokens(response_mask_BT, valid_B), advantages_B.unsqueeze(-1), 0)


def check_fractions(**options: float) -> None:
    """Refuse a discount outside [0, 1].

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name}={value}: use a number from 0 to 1")
