"""The most likely tokens, and log-probs of several tokens at one position, against whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.data.experience import computed
from rl_plugins.models import log_probs as module
from rl_plugins.models.log_probs import last_linear_head, response_log_probs
from rl_plugins.models.token_distributions import ColumnSpec, chunked_head_columns, distribution_columns
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.memory import LargestNewTensor, at_once
from rl_plugins.tests.models.samples import VOCABULARY, batch_of, forward_arguments, random_samples, tiny

LENGTHS = [(5, 4), (2, 6), (7, 1), (3, 0)]
K = 3


def whole_log_probs(model: Any, samples: Any) -> Tensor:
    """Compute log-probs [N, V] of response positions from the logits of all positions, at temperature 0.7."""
    parts = []
    for prompt, response in samples:
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
        parts.append((logits[len(prompt) - 1 : len(prompt) - 1 + len(response)] / 0.7).log_softmax(dim=-1))
    return torch.cat(parts)


def of_response(samples: Any, tokens_NK: Tensor) -> Tensor:
    """Pad tokens of the response positions [N, K] to [B, T, K]."""
    lengths = [len(response) for _, response in samples]
    rows = [torch.nn.functional.pad(row, (0, 0, 0, max(lengths) - len(row))) for row in tokens_NK.split(lengths)]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("family", "packed", "head_is_last"),
    [("Qwen2", False, True), ("Qwen2", True, True), ("Gemma2", False, False)],
)
@for_each("rows", [1, 4, 1000])
def test_top_k_and_given_tokens_equal_whole_logits(
    monkeypatch: pytest.MonkeyPatch, family: str, packed: bool, head_is_last: bool, rows: int
) -> None:
    monkeypatch.setattr(module, "logits_at_once", at_once(rows * VOCABULARY))
    model, samples = tiny(family), random_samples(*LENGTHS)
    batch = batch_of(samples)
    mask = batch.response_mask.bool()
    arguments = {**forward_arguments(batch), "temperature": 0.7, "packed": packed}
    expected = whole_log_probs(model, samples)
    top_log_probs, top_ids = expected.topk(K, dim=-1)
    tops = response_log_probs(model, **arguments, top_k=K, sum_pi_squared=True)
    assert tops.top_ids_BTK is not None and tops.top_log_probs_BTK is not None and tops.log_probs_BTK is None
    assert torch.equal(tops.top_ids_BTK[mask], top_ids)
    torch.testing.assert_close(tops.top_log_probs_BTK[mask], top_log_probs.detach(), rtol=1e-6, atol=1e-6)
    assert not tops.top_log_probs_BTK.requires_grad and tops.log_probs_BT.requires_grad

    # Random tokens, one token twice, and the sampled token.
    given = torch.randint(VOCABULARY, (len(top_ids), 4), generator=torch.Generator().manual_seed(7))
    given[:, 1], given[::2, 2] = given[:, 0], batch.responses[mask][::2]
    result = response_log_probs(model, **arguments, tokens_BTK=of_response(samples, given), entropy_gradient=True)
    assert result.log_probs_BTK is not None and result.top_ids_BTK is None and result.sum_pi_squared_BT is None
    got, wanted = result.log_probs_BTK[mask], expected.gather(-1, given)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    weights = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    sampled = expected.gather(-1, batch.responses[mask][:, None])[:, 0]
    entropy = -(expected.exp() * expected).sum(dim=-1)
    parameters = list(model.parameters())
    losses = [
        (weights * got).sum() + (result.log_probs_BT[mask] - 0.3 * computed(result.entropy_BT)[mask]).sum(),
        (weights * wanted).sum() + (sampled - 0.3 * entropy).sum(),
    ]
    gradients, expected_gradients = (torch.autograd.grad(loss, parameters) for loss in losses)
    for one, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    assert (last_linear_head(model, {}) is not None) == head_is_last


@for_each("family", ["Qwen2", "Gemma2"])
def test_given_tokens_may_be_missing_for_further_rows_without_a_response(family: str) -> None:
    """A row with a blank image has only a prompt."""
    model, batch = tiny(family), batch_of(random_samples(*LENGTHS))
    given = torch.stack([batch.responses, batch.responses + 1], dim=-1)
    arguments = forward_arguments(batch)
    longer = {
        name: torch.cat([value, value[-1:]]) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    found = [response_log_probs(model, **inputs, tokens_BTK=given).log_probs_BTK for inputs in (arguments, longer)]
    torch.testing.assert_close(computed(found[1])[: len(batch)], computed(found[0]), rtol=1e-10, atol=1e-10)


def test_chunked_head_columns_of_several_tokens_equal_plain_operations() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((7, 5), (11, 5), (11,))
    )
    tokens, extra = torch.randint(11, (7,), generator=generator), torch.randint(11, (7, 4), generator=generator)
    columns = ColumnSpec(0.6, sum_pi_squared=True, entropy_gradient=True, top_k=2)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    expected = distribution_columns(logits, tokens, columns, extra)
    assert expected.shape == (7, 2 + 1 + 2 * 2 + 4)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for rows in (1, 3, 7):
        got = chunked_head_columns(hidden, weight, bias, tokens, columns, extra, rows=rows)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        gradients, expected_gradients = (
            torch.autograd.grad((weights * one).sum(), [hidden, weight, bias], retain_graph=True)
            for one in (got, expected)
        )
        for one, other in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_chunked_head_with_top_k_makes_no_tensor_of_the_size_of_the_logits() -> None:
    length, width, vocabulary, rows = 64, 8, 128, 16
    hidden, weight = torch.randn(length, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    tokens, extra = torch.randint(vocabulary, (length,)), torch.randint(vocabulary, (length, 4))
    with LargestNewTensor() as forward:
        result = chunked_head_columns(hidden, weight, None, tokens, ColumnSpec(top_k=4), extra, rows=rows)
    with LargestNewTensor() as backward:
        result.sum().backward()
    for noted in (forward, backward):
        assert max(noted.elements.values()) <= rows * vocabulary < length * vocabulary
