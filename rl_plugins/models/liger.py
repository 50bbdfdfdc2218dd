"""Kernels of the library Liger for models on GPUs: norms, rotary positions and MLPs, and log-probs at the output head.

The library is optional. Source: Liger Kernel, https://arxiv.org/abs/2410.10989.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.liger import apply_liger_kernel

from rl_plugins.errors import ConfigError

_MARK = "has_liger_kernels"


def use_liger(model: nn.Module, name: str) -> None:
    """Replace norms, rotary positions and MLPs of a model by kernels of Liger. The parameters stay the same.

    Rotary positions are replaced in all models of the same family in this process.

    Args:
        model: model of transformers, with or without an adapter.
        name: name of the model, for messages.

    Raises:
        ConfigError: Liger has no kernels for the family of the model.
    """
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"LigerKernels: Liger has no kernels for the {name}, a {family}: leave LigerKernels out")
    # The output head is `fused_log_probs`. Liger's own head returns a loss without log-probs.
    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    setattr(model, _MARK, True)


def has_liger(model: Callable[..., Any]) -> bool:
    """Return True if a model, or the model inside a model engine, uses kernels of Liger."""
    return getattr(getattr(model, "module", model), _MARK, False)


def fused_log_probs(hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, tokens_N: Tensor) -> Tensor:
    """Compute log-probs of tokens [N] in float32 under `softmax(hidden_NH @ weight_VH.T + bias_V)`.

    The logits exist for one chunk of positions at a time, and are computed again in backward. Sums of gradients over
    chunks are in float32.

    Args:
        hidden_NH: hidden states before the head, of at least one position.
        weight_VH: weight of the head.
        bias_V: bias of the head, if any.
        tokens_N: ids of the tokens.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss_N: Tensor = liger_fused_linear_cross_entropy(
        hidden_NH, weight_VH, tokens_N, bias=bias_V, reduction="none", accum_dtype=torch.float32
    )
    return -loss_N
