"""Section `packed_attention`: rows of samples by one kernel of torch and sample by sample, values and times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from integration_tests.gpu.without_vllm.cases import Case, Place, Skipped, seconds_of
from integration_tests.gpu.without_vllm.kernel import takes_enable_gqa, use_kernel_of_this_torch
from rl_plugins.models import packed_attention as module
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.packed_attention import Stretches, has_kernel, packed_sdpa, use_packed_attention
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny

# Share of a norm: the kernels round in different orders.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.03}


class _Layer(nn.Module):
    """Attributes of an attention layer of Qwen2.5-7B: 28 heads of queries, 4 of keys and values."""

    is_causal = True
    num_key_value_groups = 7
    heads, groups, width = 28, 4, 128


def cases(place: Place) -> Iterable[Case]:
    """Return the cases."""
    use_kernel_of_this_torch()
    yield Case("kernel bfloat16", lambda: by_kernel(place))
    for dtype in (torch.bfloat16, torch.float32):
        yield Case(f"sample by sample {_name(dtype)}", partial(sample_by_sample, place, dtype))
        for window in (None, 5):
            words = f"shared prompts {_name(dtype)}" + (f", window {window}" if window else "")
            yield Case(words, partial(check_shared_prompts, place, dtype, window))


def by_kernel(place: Place) -> Mapping[str, Any]:
    """Return the milliseconds of a forward and backward pass, and the difference to samples by themselves."""
    layer, heads, stretches = _row(place, torch.bfloat16)
    if not has_kernel(heads[0], heads[2]):
        raise Skipped("the kernel needs a GPU from Ampere on")
    seconds = seconds_of(place, lambda: _attend(layer, heads, stretches))
    found = _attend(layer, heads, stretches)
    with patch.object(module, "has_kernel", lambda query, value: False):
        expected = _attend(layer, heads, stretches)
    difference = max(map(_relative, found, expected))
    assert difference < _TOLERANCE[torch.bfloat16], f"outputs and gradients differ by {difference:.2g} of their norms"
    return {"tokens": heads[0].shape[2], "ms": 1e3 * seconds, "difference": difference,
            "enable_gqa": takes_enable_gqa()}  # fmt: skip


def sample_by_sample(place: Place, dtype: torch.dtype) -> Mapping[str, Any]:
    """Return the milliseconds of a forward and backward pass without the kernel."""
    layer, heads, stretches = _row(place, dtype)
    with patch.object(module, "has_kernel", lambda query, value: False):
        seconds = seconds_of(place, lambda: _attend(layer, heads, stretches))
    return {"tokens": heads[0].shape[2], "ms": 1e3 * seconds}


def check_shared_prompts(place: Place, dtype: torch.dtype, window: int | None) -> Mapping[str, Any]:
    """Compare log-probs and gradients of a row with a shared prompt with a padded batch."""
    batch = batch_of(random_samples((6, 4), (6, 7), (6, 1), (6, 4)))
    batch.prompts[:] = batch.prompts[0]
    family, options = ("Mistral", {"sliding_window": window}) if window else ("Qwen2", {})
    model = tiny(family, attn_implementation="sdpa", initializer_range=0.1, **options).to(place.device, dtype)
    use_packed_attention(model)
    arguments: dict[str, Any] = {
        name: value.to(place.device) if isinstance(value, Tensor) else value
        for name, value in forward_arguments(batch).items()
    }
    results, mask = [], batch.response_mask.bool().to(place.device)
    for packed in (False, True):
        model.zero_grad()
        log_probs = response_log_probs(model, **arguments, packed=packed).log_probs_BT[mask]
        log_probs.sum().backward()
        # In one vector, because some gradients are zero but for rounding: those of the biases of keys.
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((log_probs.detach(), gradients))
    difference = max(map(_relative, results[1], results[0]))
    assert difference < 3 * _TOLERANCE[dtype], f"log-probs and gradients differ by {difference:.2g} of their norms"
    return {"difference": difference}


def _row(place: Place, dtype: torch.dtype) -> tuple[_Layer, tuple[Tensor, ...], Stretches]:
    """Return a layer, heads of queries, keys and values of samples of many lengths, and the stretches."""
    generator = torch.Generator(place.device).manual_seed(0)
    lengths_N = torch.arange(197, 1661, 61) if place.on_gpu else torch.tensor([5, 9, 3])
    heads = tuple(
        torch.randn(
            1, count, int(lengths_N.sum()), _Layer.width, device=place.device, dtype=dtype, generator=generator
        ).requires_grad_()
        for count in (_Layer.heads, _Layer.groups, _Layer.groups)
    )
    return _Layer(), heads, Stretches.of_lengths(lengths_N, lengths_N, torch.device(place.device))


def _attend(layer: _Layer, heads: tuple[Tensor, ...], stretches: Stretches) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    query, key, value = heads
    output, _ = packed_sdpa(layer, query, key, value, None, stretches=stretches)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), heads)]


def _relative(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)
    return float(difference)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
