"""Stand-in for the library Liger, whose kernels run on GPUs only: the same results by functions of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.integrations import liger as door


@dataclass
class PlainLiger:
    """Record of the calls of the library.

    Attributes:
        options: options of the kernels of each model.
        heads: dtypes of hidden states and weight in each call of the fused head.
    """

    options: list[dict[str, Any]] = field(default_factory=list)
    heads: list[tuple[torch.dtype, torch.dtype]] = field(default_factory=list)

    def apply(self, model: nn.Module, **options: Any) -> None:
        """Replace the forward of all norms, as Liger does: on each module."""
        self.options.append(options)
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.__dict__["forward"] = _norm.__get__(module)

    def head(self, hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
        """Compute the cross-entropy of each token."""
        assert options.keys() == {"bias", "reduction", "accum_dtype"} and options["reduction"] == "none"
        assert options["accum_dtype"] == torch.float32
        self.heads.append((hidden.dtype, weight.dtype))
        loss: Tensor = _Head.apply(hidden, weight, target, options["bias"])
        return loss


def _norm(self: Any, hidden: Tensor) -> Tensor:
    return nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.variance_epsilon)


class _Head(torch.autograd.Function):
    """As in Liger, the function keeps the detached weight, and backward computes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden.detach(), weight.detach(), target, None if bias is None else bias.detach())
        return nn.functional.cross_entropy(nn.functional.linear(hidden, weight, bias), target, reduction="none")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, target, bias = ctx.saved_tensors
        inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(nn.functional.linear(hidden, weight, bias), target, reduction="none")
        gradients = list(torch.autograd.grad(loss, inputs, gradient))
        return gradients[0], gradients[1], None, gradients[2] if bias is not None else None


@contextmanager
def plain_liger() -> Iterator[PlainLiger]:
    """Install the stand-in inside the block, with kernels for Qwen2 alone."""
    calls = PlainLiger()
    package, transformers = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    functional, monkey_patch = (
        ModuleType(f"liger_kernel.transformers.{name}") for name in ("functional", "monkey_patch")
    )
    vars(transformers)["_apply_liger_kernel_to_instance"] = calls.apply
    vars(functional)["liger_fused_linear_cross_entropy"] = calls.head
    vars(monkey_patch)["MODEL_TYPE_TO_APPLY_LIGER_FN"] = {"qwen2": calls.apply}
    modules = {module.__name__: module for module in (package, transformers, functional, monkey_patch)}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules, modules))
        stack.enter_context(patch.object(door, "is_liger_kernel_available", lambda: True))
        yield calls
