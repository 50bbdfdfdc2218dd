"""Speed of bfloat16 on the CPU of this machine."""

from __future__ import annotations

import torch


def multiplies_bfloat16() -> bool:
    """Return True if the CPU has instructions for bfloat16 products; other CPUs are faster in float32."""
    return bool(torch.cpu._is_avx512_bf16_supported())
