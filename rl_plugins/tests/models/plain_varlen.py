"""Stand-in for the kernel `varlen_attn` of torch, which runs on GPUs only: attention with one mask over the row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from rl_plugins.models import packed_attention


class VarlenCall(NamedTuple):
    """Arguments of a call besides the heads."""

    starts: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    window_size: tuple[int, int]
    enable_gqa: bool


class PlainVarlen:
    """Compute the same as `varlen_attn`, without waiting for the device. Axes as in `packed_attention`.

    Attributes:
        calls: arguments of all calls.
    """

    def __init__(self) -> None:
        self.calls: list[VarlenCall] = []

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        """Compute attention in which the last query of a sample attends to the last key of the sample."""
        self.calls.append(VarlenCall((cu_seq_q, cu_seq_k), (max_q, max_k), window_size, enable_gqa))
        sample_M, after_M = _places(len(query), cu_seq_q)
        sample_F, after_F = _places(len(key), cu_seq_k)
        # The last query of a sample and the last key have the same place.
        before_MF = after_F - after_M[:, None]
        mask_MF = (sample_M[:, None] == sample_F) & (before_MF >= -window_size[1])
        if window_size[0] >= 0:
            mask_MF &= before_MF <= window_size[0]
        q, k, v = (tokens.transpose(0, 1)[None] for tokens in (query, key, value))
        output = nn.functional.scaled_dot_product_attention(q, k, v, mask_MF, scale=scale, enable_gqa=enable_gqa)
        return output[0].transpose(0, 1)


@contextmanager
def plain_varlen() -> Iterator[None]:
    """Let packed attention use the stand-in for all heads inside the block."""
    with (
        patch.object(packed_attention, "varlen_attn", PlainVarlen()),
        patch.object(packed_attention, "has_kernel", lambda query, value: True),
    ):
        yield


def _places(count: int, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each token the number of its sample, and the number of tokens after it in the sample."""
    places = torch.arange(count, device=starts.device)
    sample = torch.bucketize(places, starts[1:], right=True)
    return sample, starts[1:][sample] - 1 - places
