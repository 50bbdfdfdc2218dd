"""Instructions of this machine's CPU for products of numbers of 16 bits."""

from __future__ import annotations

import torch


def multiplies_bfloat16() -> bool:
    """Return True if the CPU has instructions for bfloat16 products; other CPUs are faster in float32."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def multiplies_float16() -> bool:
    """Return True if the CPU has instructions for float16 products; other CPUs are faster in float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
