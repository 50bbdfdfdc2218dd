"""Kernel of packed rows in torch 2.11. Heads that share keys need no argument there; torch 2.12 added `enable_gqa`."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rl_plugins.models import packed_attention


def takes_enable_gqa() -> bool:
    """Return True from torch 2.12 on."""
    return "enable_gqa" in signature(varlen_attn).parameters


def use_kernel_of_this_torch() -> None:
    """Let `packed_sdpa` call the kernel of torch 2.11, too."""
    if not takes_enable_gqa():
        packed_attention.varlen_attn = _without_enable_gqa  # type: ignore[assignment]


def _without_enable_gqa(*arguments: Any, enable_gqa: bool, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    return varlen_attn(*arguments, **options)
