"""Log-probs (and entropy) of sampled tokens, chunk by chunk, so that float32 logits of a batch never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**24
"""Logits turned to float32 at a time: 64 MB."""


@dataclass(frozen=True)
class ResponseLogProbs:
    """`log_probs_BT` of the response tokens; `entropy_BT` of the distributions they were drawn from (no gradient)."""

    log_probs_BT: Tensor
    entropy_BT: Tensor


def _chunk_log_probs(logits_NV: Tensor, tokens_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    scaled_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature
    normaliser_N = scaled_NV.logsumexp(dim=-1)
    log_probs_N = scaled_NV.gather(-1, tokens_N[:, None]).squeeze(-1) - normaliser_N
    with torch.no_grad():
        expected_N = (scaled_NV.sub(normaliser_N[:, None]).exp_() * scaled_NV).sum(dim=-1)
    return log_probs_N, normaliser_N.detach() - expected_N


def token_log_probs(logits_BTV: Tensor, tokens_BT: Tensor, temperature: float = 1.0) -> ResponseLogProbs:
    """Log-probs of `tokens_BT` under `softmax(logits / temperature)`, and that distribution's entropy.

    The float32 copy of the logits (float64 of float64) is made, and recomputed in backward, `CHUNK_ELEMENTS`
    at a time. Give contiguous logits: others are copied whole, in their own dtype.
    """
    vocabulary = logits_BTV.shape[-1]
    logits_NV, tokens_N = logits_BTV.reshape(-1, vocabulary), tokens_BT.reshape(-1)
    rows = max(1, CHUNK_ELEMENTS // vocabulary)
    if logits_NV.shape[0] <= rows:
        log_probs_N, entropy_N = _chunk_log_probs(logits_NV, tokens_N, temperature)
    else:
        parts = [
            checkpoint(_chunk_log_probs, logits, tokens, temperature, use_reentrant=False)
            for logits, tokens in zip(logits_NV.split(rows), tokens_N.split(rows), strict=True)
        ]
        log_probs_N, entropy_N = (torch.cat(column) for column in zip(*parts, strict=True))
    return ResponseLogProbs(log_probs_N.view_as(tokens_BT), entropy_N.view_as(tokens_BT))


def response_log_probs(
    model: Callable[..., object],
    *,
    input_ids_BS: Tensor,
    attention_mask_BS: Tensor,
    position_ids_BS: Tensor,
    response_width: int,
    temperature: float = 1.0,
) -> ResponseLogProbs:
    """One forward pass; log-probs of the last `response_width` tokens of every row, [B, T].

    Only the logits that predict response tokens are computed (`logits_to_keep`). Padded positions give finite
    numbers without meaning: mask them.
    """
    output = model(
        input_ids=input_ids_BS,
        attention_mask=attention_mask_BS,
        position_ids=position_ids_BS,
        use_cache=False,
        logits_to_keep=response_width + 1,
    )
    # The last position predicts nothing, but cutting it off would copy the logits: it gets any token.
    next_tokens_BT = input_ids_BS.roll(-1, dims=1)[:, -(response_width + 1) :]
    result = token_log_probs(output.logits, next_tokens_BT, temperature)  # type: ignore[attr-defined]
    return ResponseLogProbs(result.log_probs_BT[:, :-1], result.entropy_BT[:, :-1])
