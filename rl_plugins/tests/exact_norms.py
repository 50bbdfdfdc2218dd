"""RMS norms of float64 states in float64.

transformers computes them in float32, which leaves seven digits of a gradient and hides what differs after them. Import
this for gradients that shall agree to more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


def _patch(norm: type[torch.nn.Module]) -> None:
    in_float32 = norm.forward

    def forward(self: torch.nn.Module, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != torch.float64:
            normed: Tensor = in_float32(self, hidden_states)
            return normed
        weight, epsilon = self.weight, self.variance_epsilon
        assert isinstance(weight, Tensor) and isinstance(epsilon, float)
        return weight * hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + epsilon)

    norm.forward = forward


for _norm in (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
    _patch(_norm)
