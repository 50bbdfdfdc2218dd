"""chunked_head_columns against definitions in NumPy, finite differences, and autograd of whole logits."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rl_plugins.models.token_distributions import ColumnSpec, chunked_head_columns, distribution_columns
from rl_plugins.tests.algorithms.reference import token_distributions as reference
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.memory import LargestNewTensor

LENGTH, WIDTH, VOCABULARY = 7, 5, 11


class Head(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    tokens: Tensor


def random_head(length: int = LENGTH, dtype: torch.dtype = torch.float64) -> Head:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    tokens = torch.randint(VOCABULARY, (length,), generator=generator)
    return Head(normal(length, WIDTH), normal(VOCABULARY, WIDTH), normal(VOCABULARY), tokens)


def whole(head: Head, columns: ColumnSpec, *, bias: bool) -> Tensor:
    logits = nn.functional.linear(head.hidden, head.weight, head.bias if bias else None)
    return distribution_columns(logits, head.tokens, columns)


def chunked(head: Head, columns: ColumnSpec, *, bias: bool, rows: int) -> Tensor:
    offset = head.bias if bias else None
    return chunked_head_columns(head.hidden, head.weight, offset, head.tokens, columns, rows=rows)


@for_each("temperature", [1.0, 0.6, 1.7])
@for_each("bias", [False, True])
@for_each("length", [0, 1, LENGTH])
def test_columns_of_whole_and_chunked_heads_equal_the_definitions(length: int, bias: bool, temperature: float) -> None:
    head = random_head(length)
    offset = head.bias.detach().numpy() if bias else np.zeros(VOCABULARY)
    expected = reference.columns(
        head.hidden.detach().numpy(), head.weight.detach().numpy(), offset, head.tokens.tolist(), temperature
    )
    columns = ColumnSpec(temperature, sum_pi_squared=True)
    results = [
        whole(head, columns, bias=bias),
        *(chunked(head, columns, bias=bias, rows=rows) for rows in (1, 3, 7, 9)),
    ]
    for result in results:
        np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-9, atol=1e-9)


@for_each(("entropy_gradient", "sum_pi_squared"), itertools.product([False, True], repeat=2))
@for_each("bias", [False, True])
@for_each("rows", [1, 3, 7])
def test_chunked_head_columns_have_the_gradients_of_whole_logits(
    rows: int, bias: bool, entropy_gradient: bool, sum_pi_squared: bool
) -> None:
    head, columns = random_head(), ColumnSpec(0.6, sum_pi_squared, entropy_gradient)
    inputs = [head.hidden, head.weight, *([head.bias] if bias else [])]
    results = [whole(head, columns, bias=bias), chunked(head, columns, bias=bias, rows=rows)]
    # Every number has a weight. A weight of a number without a gradient must have no effect.
    weights = torch.randn(results[0].shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    expected, got = (torch.autograd.grad((weights * result).sum(), inputs) for result in results)
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunked_head_gradients_equal_finite_differences(entropy_gradient: bool) -> None:
    head = random_head()
    columns = ColumnSpec(0.6, entropy_gradient=entropy_gradient)
    weights = torch.randn(LENGTH, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs = [head.hidden, head.weight, head.bias]
    result = chunked(head, columns, bias=True, rows=3)
    gradients = torch.autograd.grad((weights * result).sum(), inputs)
    arrays = [tensor.detach().numpy().copy() for tensor in inputs]
    factors = weights.numpy().copy()
    if not entropy_gradient:
        factors[:, 1] = 0

    def loss() -> float:
        hidden, weight, bias = arrays
        return float((factors * reference.columns(hidden, weight, bias, head.tokens.tolist(), 0.6)[:, :2]).sum())

    step = 1e-6
    for array, gradient in zip(arrays, gradients, strict=True):
        for index in np.ndindex(array.shape):
            value = array[index]
            array[index] = value + step
            above = loss()
            array[index] = value - step
            below = loss()
            array[index] = value
            assert gradient[index].item() == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-6)


@for_each("wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("weight", "bias")])
def test_chunked_head_computes_only_required_gradients(wanted: tuple[str, ...]) -> None:
    head, columns = random_head(), ColumnSpec()
    full = torch.autograd.grad(whole(head, columns, bias=True)[:, 0].sum(), [getattr(head, name) for name in wanted])
    frozen = Head(*(tensor.detach() for tensor in head))
    leaves = [getattr(frozen, name).requires_grad_() for name in wanted]
    chunked(frozen, columns, bias=True, rows=2)[:, 0].sum().backward()
    for leaf, expected in zip(leaves, full, strict=True):
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)
    assert all(getattr(frozen, name).grad is None for name in ("hidden", "weight", "bias") if name not in wanted)


def test_chunked_head_sums_bfloat16_gradients_in_float32() -> None:
    """With many small summands, a bfloat16 sum would stop growing."""
    length = 2000
    generator = torch.Generator().manual_seed(6)
    hidden = (1 + 0.1 * torch.randn(length, WIDTH, generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).bfloat16().requires_grad_()
    tokens = torch.zeros(length, dtype=torch.int64)
    result = chunked_head_columns(hidden, weight, None, tokens, ColumnSpec(), rows=2)
    assert result.dtype == torch.float32
    (gradient,) = torch.autograd.grad(result[:, 0].sum(), weight)
    assert gradient.dtype == torch.bfloat16
    double = weight.detach().double().requires_grad_()
    exact = distribution_columns(hidden.detach().double() @ double.T, tokens, ColumnSpec())
    (expected,) = torch.autograd.grad(exact[:, 0].sum(), double)
    torch.testing.assert_close(result.double(), exact, rtol=2e-2, atol=2e-2)  # the logits are rounded to bfloat16
    torch.testing.assert_close(gradient.double(), expected, rtol=2e-2, atol=1e-2 * float(expected.abs().max()))


def test_chunked_head_under_autocast_rounds_like_a_linear_layer() -> None:
    head, columns = random_head(dtype=torch.float32), ColumnSpec(0.6, entropy_gradient=True)
    inputs = [head.hidden, head.weight, head.bias]
    with torch.autocast("cpu", torch.bfloat16):
        results = [whole(head, columns, bias=True), chunked(head, columns, bias=True, rows=3)]
    expected, got = (torch.autograd.grad(result.sum(), inputs) for result in results)
    assert results[0].dtype == results[1].dtype == torch.float32
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    for one, other in zip(expected, got, strict=True):
        assert one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@for_each("dtype", [torch.bfloat16, torch.float32])
@for_each("columns", [ColumnSpec(), ColumnSpec(0.7, sum_pi_squared=True, entropy_gradient=True)])
def test_chunked_head_makes_no_tensor_of_the_size_of_the_logits(columns: ColumnSpec, dtype: torch.dtype) -> None:
    length, width, vocabulary, rows = 64, 8, 128, 16
    hidden = torch.randn(length, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    tokens = torch.randint(vocabulary, (length,))
    largest = max(rows * vocabulary, vocabulary * width, length * width)
    with LargestNewTensor() as forward:
        result = chunked_head_columns(hidden, weight, None, tokens, columns, rows=rows)
    with LargestNewTensor() as backward:
        result.sum().backward()
    for noted in (forward, backward):
        assert max(noted.elements.values()) == largest < length * vocabulary
