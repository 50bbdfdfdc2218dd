"""Section `liger`: blocks and the output head by the kernels of Liger, if the library is installed.

On a machine without a GPU, `TRITON_INTERPRET=1` runs the kernels of the output head on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from integration_tests.gpu.without_vllm.cases import Case, Place, Skipped, need, seconds_of
from integration_tests.gpu.without_vllm.output_head import head_inputs
from rl_plugins.models.liger import fused_log_probs, use_liger
from rl_plugins.models.token_distributions import ColumnSpec, chunked_head_columns, logits_at_once

# Share of a norm: the kernels round in different orders.
_TOLERANCE = 0.03


def cases(place: Place) -> Iterable[Case]:
    """Return the cases."""
    return [Case("blocks", partial(blocks, place)), Case("output head", partial(output_head, place))]


def blocks(place: Place) -> Mapping[str, Any]:
    """Return the milliseconds of passes through four blocks, and the difference of logits and gradients.

    Raises:
        AssertionError: logits or gradients differ.
    """
    need("liger_kernel", "model.liger")
    if not place.on_gpu:
        raise Skipped("the kernels of Liger need a GPU")
    tokens, width = 4096, 2048
    config = Qwen2Config(vocab_size=64, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.to(place.device, torch.bfloat16)
    ids = torch.randint(64, (1, tokens), device=place.device)

    def step() -> list[Tensor]:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        gradients = torch.autograd.grad(logits.float().square().mean(), list(model.parameters()))
        return [logits.detach(), *gradients]

    expected, plain_s = step(), seconds_of(place, step, repeats=3)
    use_liger(model, "policy")
    found, seconds = step(), seconds_of(place, step, repeats=3)
    return {"ms": 1e3 * seconds, "without_ms": 1e3 * plain_s, "difference": _difference(found, expected)}


def output_head(place: Place) -> Mapping[str, Any]:
    """Return the milliseconds of a forward and backward pass, and the difference to the chunked head.

    Raises:
        AssertionError: log-probs or gradients differ.
    """
    need("liger_kernel", "model.liger")
    if not place.on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise Skipped("the kernels of Liger need a GPU")
    hidden, weight, tokens = head_inputs(place)
    factors = torch.rand(len(tokens), device=place.device, generator=torch.Generator(place.device).manual_seed(0))
    rows = max(1, logits_at_once(hidden.device).chunk // len(weight))

    def with_gradients(log_probs: Tensor) -> list[Tensor]:
        return [log_probs.detach(), *torch.autograd.grad((factors * log_probs).sum(), (hidden, weight))]

    def fused() -> list[Tensor]:
        return with_gradients(fused_log_probs(hidden, weight, None, tokens))

    def chunked() -> list[Tensor]:
        return with_gradients(chunked_head_columns(hidden, weight, None, tokens, ColumnSpec(), rows=rows)[:, 0])

    difference = _difference(fused(), chunked())
    seconds, chunked_s = seconds_of(place, fused, repeats=3), seconds_of(place, chunked, repeats=3)
    return {"ms": 1e3 * seconds, "chunked_ms": 1e3 * chunked_s, "difference": difference}


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference in shares of a norm."""
    pairs = zip(found, expected, strict=True)
    largest = max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)
    assert largest < _TOLERANCE, f"results differ by {largest:.2g} of their norms"
    return largest
