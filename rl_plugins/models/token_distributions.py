"""What is known of the distribution that a token was drawn from: `softmax(logits / temperature)` over the vocabulary.

Axes: `N` tokens, `V` vocabulary, `K` columns: the token's log-prob, the entropy and, on request, the sum of squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """Which numbers are computed of every distribution.

    Attributes:
        temperature: the logits are divided by it.
        sum_pi_squared: sum over the vocabulary of the squared probabilities, too.
        entropy_gradient: the entropy has a gradient.
    """

    temperature: float = 1.0
    sum_pi_squared: bool = False
    entropy_gradient: bool = False


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, and float64 for float64: what sums over the vocabulary are taken in."""
    return torch.promote_types(dtype, torch.float32)


def distribution_columns(logits_NV: Tensor, tokens_N: Tensor, columns: Columns) -> Tensor:
    """The columns [N, K] in float32 (float64 of float64), by plain operations that autograd knows.

    The log-probs have a gradient; the entropy `lse(z) - sum softmax(z) z` has one if asked for; the sum of squares
    `exp(lse(2z) - 2 lse(z))` has none.
    """
    # Autocast would take the dot products in 16 bits.
    with torch.autocast(logits_NV.device.type, enabled=False):
        scaled_NV = logits_NV.to(accumulation_dtype(logits_NV.dtype)) / columns.temperature
        normaliser_N = scaled_NV.logsumexp(dim=-1)
        log_probs_N = scaled_NV.gather(-1, tokens_N[:, None]).squeeze(-1) - normaliser_N
        with torch.set_grad_enabled(columns.entropy_gradient and torch.is_grad_enabled()):
            pi_NV = scaled_NV.sub(normaliser_N[:, None]).exp_()
            entropy_N = normaliser_N - torch.linalg.vecdot(pi_NV, scaled_NV)
        results = [log_probs_N, entropy_N]
        if columns.sum_pi_squared:
            results.append(torch.linalg.vecdot(pi_NV.detach(), pi_NV.detach()))
        return torch.stack(results, dim=-1)
