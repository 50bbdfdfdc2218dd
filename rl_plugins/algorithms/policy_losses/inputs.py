"""What every policy loss does to its inputs before anything else: mask, bound, check."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exponentiation: e^20 is finite in float32 and far outside any clip range."""


def zero_masked(response_mask_BT: Tensor, *tensors_BT: Tensor) -> tuple[Tensor, ...]:
    """The tensors with 0 at masked positions, whatever stood there; those positions get no gradient."""
    valid_BT = response_mask_BT.bool()
    return tuple(torch.where(valid_BT, tensor_BT, 0) for tensor_BT in tensors_BT)


def bounded_log_ratio(log_probs_BT: Tensor, old_log_probs_BT: Tensor) -> Tensor:
    """`log_probs - old_log_probs`, within +-`MAX_LOG_RATIO`; no gradient beyond."""
    return (log_probs_BT - old_log_probs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def check_not_negative(**options: float) -> None:
    """Refuse widths and bounds below 0.

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}: must be 0 or more")


def check_positive(**options: float) -> None:
    """Refuse factors that must be above 0.

    Raises:
        ValueError: naming the option.
    """
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name}={value}: must be above 0")


def check_share(share: float) -> None:
    """Refuse a share that is not in (0, 1].

    Raises:
        ValueError: it is not.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share={share}: must be above 0 and at most 1, the share of valid tokens")
