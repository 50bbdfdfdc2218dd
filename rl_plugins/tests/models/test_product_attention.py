"""product_attention equals attention in float64, up to the rounding of bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_plugins.models import packed_attention
from rl_plugins.models import product_attention as module
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.models.product_attention import product_attention
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny


def heads(*shape: int, seed: int, times: float = 1.0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * times
    return numbers.bfloat16().requires_grad_()


def exact(query_NQHD: Tensor, key_NKGD: Tensor, value_NKGD: Tensor, scale: float, window: int | None) -> Tensor:
    (_, q, h, _), (_, k, groups, _) = query_NQHD.shape, key_NKGD.shape
    query, key, value = (heads.double().transpose(1, 2) for heads in (query_NQHD, key_NKGD, value_NKGD))
    key, value = (heads.repeat_interleave(h // groups, dim=1) for heads in (key, value))
    distance_QK = torch.arange(k - q, k)[:, None] - torch.arange(k)
    seen_QK = (distance_QK >= 0) & (distance_QK < (window or k))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen_QK, -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm().detach() / expected.norm().detach())


SHAPES = [
    # samples, queries, keys, heads of queries, heads of keys, width, window
    (3, 17, 17, 4, 2, 16, None),
    (2, 9, 23, 4, 4, 8, None),
    (2, 20, 33, 6, 2, 16, 7),
    (1, 1, 1, 2, 1, 8, None),
    (2, 40, 40, 2, 2, 8, 3),
]


@for_each("elements", [1, 300, 2**20])
@for_each("shape", SHAPES)
def test_product_attention_and_gradients_equal_float64_attention(
    shape: tuple[int, int, int, int, int, int, int | None], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", elements)
    n, q, k, h, g, d, window = shape
    of = heads(n, q, h, d, seed=0), heads(n, k, g, d, seed=1), heads(n, k, g, d, seed=2)
    gradient = heads(n, q, h, d, seed=3).detach()
    expected, found = exact(*of, 0.3, window), product_attention(*of, scale=0.3, window=window)
    assert found.dtype == torch.bfloat16
    assert error(found, expected) < 4e-3
    for one, other in zip(
        torch.autograd.grad(found, of, gradient), torch.autograd.grad(expected, of, gradient.double()), strict=True
    ):
        if float(other.norm()):
            assert error(one, other.double()) < 1e-2


def test_product_attention_sums_in_float32_under_a_bfloat16_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning sets the precision of the model as the default dtype during a step."""
    monkeypatch.setattr(module, "_BLOCK_QUERIES", 4)
    of = [heads(2, 64, 2, 16, seed=seed) for seed in range(3)]
    whole = torch.autograd.grad(product_attention(*of).sum(), of)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = torch.autograd.grad(product_attention(*of).sum(), of)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one, other)


def test_product_attention_takes_values_of_another_width() -> None:
    query, key, value = heads(2, 5, 4, 8, seed=0), heads(2, 7, 2, 8, seed=1), heads(2, 7, 2, 12, seed=2)
    found = product_attention(query, key, value)
    assert error(found, exact(query, key, value, 8**-0.5, None)) < 4e-3
    found.sum().backward()


def test_product_attention_keeps_large_scores_in_float32() -> None:
    query, key, value = (heads(2, 64, 4, 64, seed=seed, times=times) for seed, times in enumerate((8.0, 1.0, 1.0)))
    expected = exact(query, key, value, 1.0, None)
    scores = torch.einsum("nqhd,nkhd->nhqk", query, key)
    unseen = torch.full((64, 64), -torch.inf).triu(1)
    rounded = torch.einsum("nhqk,nkhd->nqhd", (scores.float() + unseen).softmax(dim=-1), value.float())
    assert scores.abs().max() > 200
    assert error(product_attention(query, key, value, scale=1.0), expected) < 0.1 * error(rounded, expected)


@pytest.mark.parametrize("lengths", [[(5, 4), (1, 6), (7, 1), (3, 4)], [(4, 3), (4, 6), (4, 1), (4, 3)]])
def test_product_attention_in_a_policy_is_as_exact_as_sdpa(
    lengths: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(random_samples(*lengths))
    if len({prompt for prompt, _ in lengths}) == 1:
        batch.prompts[:] = batch.prompts[0]
    found: list[tuple[Tensor, Tensor]] = []
    for dtype, suits in ((torch.float64, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        monkeypatch.setattr(packed_attention, "suits", lambda _, answer=suits: answer)
        model = tiny("Qwen2", attn_implementation="sdpa", initializer_range=0.15).to(dtype)
        use_packed_attention(model)
        log_probs = response_log_probs(model, **forward_arguments(batch), packed=True).log_probs_BT
        log_probs[batch.response_mask.bool()].sum().backward()
        found.append((log_probs.detach(), model.model.layers[0].self_attn.k_proj.weight.grad))
    for exact_, by_torch, by_products in zip(*found, strict=True):
        assert not torch.equal(by_torch, by_products)
        assert error(by_products, exact_) < 1.5 * error(by_torch, exact_)
