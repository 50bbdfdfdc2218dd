"""What the processor of this machine is fast at."""

from __future__ import annotations

import torch


def multiplies_bfloat16() -> bool:
    """Whether it has instructions for products of bfloat16 numbers; in others float32 is the faster one."""
    return bool(torch.cpu._is_avx512_bf16_supported())
