"""RMS norms of float64 states in float64.

transformers computes these norms in float32. Float32 keeps seven digits of a gradient and hides smaller differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

_Forward = Callable[[torch.nn.Module, Tensor], Tensor]
_NORMS: tuple[type[torch.nn.Module], ...] = (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


@contextmanager
def exact_norms() -> Iterator[None]:
    """Compute norms in float64 in this process, for comparisons of gradients beyond the digits of float32."""
    with ExitStack() as patches:
        for norm in _NORMS:
            patches.enter_context(mock.patch.object(norm, "forward", _exact(norm.forward)))
        yield


def _exact(in_float32: _Forward) -> _Forward:
    def forward(self: torch.nn.Module, hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != torch.float64:
            return in_float32(self, hidden_states)
        weight, epsilon = self.weight, self.variance_epsilon
        assert isinstance(weight, Tensor) and isinstance(epsilon, float)
        return weight * hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + epsilon)

    return forward
