"""Section `output_head`: time and memory of the output head, by the numbers of logits that exist at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from integration_tests.gpu.without_vllm.cases import Case, Place, seconds_of
from rl_plugins.models import token_distributions
from rl_plugins.models.token_distributions import ColumnSpec, LogitsAtOnce, chunked_head_columns, logits_at_once

_SIZES = [LogitsAtOnce(2**chunk, 2**block) for chunk, block in ((24, 22), (26, 26), (27, 26), (28, 26), (28, 28))]
_TINY_SIZES = [LogitsAtOnce(2**10, 2**8), LogitsAtOnce(2**12, 2**10)]


def cases(place: Place) -> Iterable[Case]:
    """Return a case for each size, and the size of `logits_at_once` first."""
    usual = logits_at_once(torch.device(place.device))
    for size in [usual, *(_SIZES if place.on_gpu else _TINY_SIZES)]:
        words = f"{_power(size.chunk)} and {_power(size.block)}"
        yield Case(f"default, {words}" if size is usual else words, partial(run, place, size))


def run(place: Place, size: LogitsAtOnce) -> Mapping[str, Any]:
    """Return the milliseconds of a forward and backward pass, and the peak of the memory in GiB.

    Raises:
        AssertionError: log-probs or gradients differ from those of the default size.
    """
    hidden, weight, tokens = head_inputs(place)
    rows = max(1, size.chunk // len(weight))

    def step() -> list[Tensor]:
        columns_NC = chunked_head_columns(hidden, weight, None, tokens, ColumnSpec(), rows=rows)
        return [columns_NC.detach(), *torch.autograd.grad(columns_NC[:, 0].sum(), (hidden, weight))]

    with patch.object(token_distributions, "logits_at_once", lambda device: size):
        found = step()
        if place.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(place, step, repeats=3)
    for tensor, norm in zip(found, _norms(place), strict=True):
        torch.testing.assert_close(tensor.double().norm(), norm, rtol=1e-3, atol=0)
    peak = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if place.on_gpu else {}
    return {"rows": rows, "ms": 1e3 * seconds, **peak}


@cache
def head_inputs(place: Place) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the weight of the head, and tokens: of Qwen2.5-7B on a GPU."""
    count, width, words = (8192, 3584, 151_936) if place.on_gpu else (64, 32, 300)
    dtype = torch.bfloat16 if place.on_gpu else torch.float32
    generator = torch.Generator(place.device).manual_seed(0)
    options: dict[str, Any] = {"device": place.device, "generator": generator}
    hidden = torch.randn(count, width, **options).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(words, width, **options)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(words, (count,), **options)


@cache
def _norms(place: Place) -> list[Tensor]:
    """Return the norms of log-probs and gradients, with chunks of the default size."""
    hidden, weight, tokens = head_inputs(place)
    rows = max(1, logits_at_once(hidden.device).chunk // len(weight))
    columns_NC = chunked_head_columns(hidden, weight, None, tokens, ColumnSpec(), rows=rows)
    gradients = torch.autograd.grad(columns_NC[:, 0].sum(), (hidden, weight))
    return [tensor.double().norm() for tensor in (columns_NC.detach(), *gradients)]


def _power(number: int) -> str:
    return f"2^{number.bit_length() - 1}"
