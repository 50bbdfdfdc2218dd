"""What is known of the distribution that a token was drawn from: `softmax(logits / temperature)` over the vocabulary.

Axes: `N` tokens, `V` vocabulary, `J` further tokens at the place of one, `K` columns: the token's log-prob, the entropy
and, on request, the sum of squares, the log-probs and the ids of the most likely tokens, and the log-probs of further
tokens.
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
        top_k: so many of the most likely tokens, the likeliest first, too: their log-probs, then their ids (as floating
            point numbers, which are exact up to a vocabulary of 2^24).
    """

    temperature: float = 1.0
    sum_pi_squared: bool = False
    entropy_gradient: bool = False
    top_k: int = 0

    @property
    def own(self) -> int:
        """How many columns there are without those of further tokens."""
        return 2 + self.sum_pi_squared + 2 * self.top_k


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Float32, and float64 for float64: what sums over the vocabulary are taken in."""
    return torch.promote_types(dtype, torch.float32)


def distribution_columns(
    logits_NV: Tensor, tokens_N: Tensor, columns: Columns, further_NJ: Tensor | None = None
) -> Tensor:
    """The columns [N, K] in float32 (float64 of float64), by plain operations that autograd knows.

    The log-probs of the token and of further ones have a gradient; the entropy has one if asked for; the sum of squares
    and the most likely tokens have none.
    """
    # Autocast would take the dot products in 16 bits.
    with torch.autocast(logits_NV.device.type, enabled=False):
        scaled_NV = logits_NV.to(accumulation_dtype(logits_NV.dtype))
        if columns.temperature != 1.0:
            scaled_NV = scaled_NV / columns.temperature
        log_pi_NV = scaled_NV.log_softmax(dim=-1)
        log_probs_N = log_pi_NV.gather(-1, tokens_N[:, None]).squeeze(-1)
        with torch.set_grad_enabled(columns.entropy_gradient and torch.is_grad_enabled()):
            pi_NV = log_pi_NV.exp()
            entropy_N = -torch.linalg.vecdot(pi_NV, log_pi_NV)
        results = [log_probs_N, entropy_N]
        if columns.sum_pi_squared:
            results.append(torch.linalg.vecdot(pi_NV.detach(), pi_NV.detach()))
        parts = [torch.stack(results, dim=-1)]
        if columns.top_k:
            tops_NK, ids_NK = log_pi_NV.detach().topk(columns.top_k, dim=-1)
            parts += [tops_NK, ids_NK.to(tops_NK.dtype)]
        if further_NJ is not None:
            parts.append(log_pi_NV.gather(-1, further_NJ))
        return torch.cat(parts, dim=-1)
