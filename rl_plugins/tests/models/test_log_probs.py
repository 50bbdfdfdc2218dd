"""Log-probs by chunks against `log_softmax`, on raw logits and on a model with padded prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_plugins.data.experience import Experience, computed
from rl_plugins.models import token_distributions
from rl_plugins.models.log_probs import ResponseLogProbs, response_log_probs
from rl_plugins.models.tiny import build_model
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.memory import LargestNewTensor, at_once
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples


def plain(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy without blocks."""
    distribution = (logits / temperature).log_softmax(dim=-1)
    chosen = distribution.gather(-1, tokens[..., None]).squeeze(-1)
    return chosen, -(distribution.exp() * distribution).sum(dim=-1)


def random_logits(batch: int = 5, length: int = 7, vocabulary: int = 31) -> tuple[Tensor, Tensor]:
    """Return logits that predict the tokens, and one position more."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(batch, length + 1, vocabulary, generator=generator, dtype=torch.float64)
    return logits, torch.randint(vocabulary, (batch, length), generator=generator)


class Logits(torch.nn.Module):
    """Model that returns fixed logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, *, logits_to_keep: int, **inputs: Any) -> Any:
        return type("Output", (), {"logits": self.logits})


def log_probs_of_logits(model: Logits, tokens: Tensor, temperature: float, **options: Any) -> ResponseLogProbs:
    """Compute numbers of the logits of a model, all of which but the last of each sample predict a token."""
    ids = nn.functional.pad(tokens, (1, 0))
    return response_log_probs(
        model,
        input_ids_BS=ids,
        attention_mask_BS=torch.ones_like(ids),
        position_ids_BS=torch.arange(ids.shape[1]).expand_as(ids),
        response_width=tokens.shape[1],
        temperature=temperature,
        **options,
    )


@for_each("entropy_gradient", [False, True])
@for_each("temperature", [1.0, 0.7, 2.5])
@for_each("rows", [1, 2, 8, 39, 40, 100])
def test_log_probs_of_logits_of_any_chunk_size_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch, rows: int, temperature: float, entropy_gradient: bool
) -> None:
    logits, tokens = random_logits()
    monkeypatch.setattr(token_distributions, "logits_at_once", at_once(rows * logits.shape[-1] + 3))
    model = Logits(logits)
    logits.requires_grad_()
    weights = torch.rand(tokens.shape, dtype=torch.float64)
    chunked = log_probs_of_logits(model, tokens, temperature, sum_pi_squared=True, entropy_gradient=entropy_gradient)
    assert chunked.sum_pi_squared_BT is not None and not chunked.sum_pi_squared_BT.requires_grad
    share = 0.4 if entropy_gradient else 0.0
    (gradient,) = torch.autograd.grad(
        (weights * chunked.log_probs_BT + share * computed(chunked.entropy_BT)).sum(), model.logits
    )
    predicting = logits[:, :-1]
    expected, entropy = plain(predicting, tokens, temperature)
    (expected_gradient,) = torch.autograd.grad((weights * expected + share * entropy).sum(), logits)
    torch.testing.assert_close(chunked.log_probs_BT, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(computed(chunked.entropy_BT), entropy, rtol=1e-12, atol=1e-12, check_stride=False)
    squares = (predicting / temperature).softmax(dim=-1).square().sum(dim=-1)
    torch.testing.assert_close(chunked.sum_pi_squared_BT, squares, rtol=1e-12, atol=1e-12)
    assert computed(chunked.entropy_BT).requires_grad == entropy_gradient


def test_log_probs_of_bfloat16_logits_are_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, tokens = random_logits()
    low = logits.bfloat16()
    monkeypatch.setattr(token_distributions, "logits_at_once", at_once(4 * logits.shape[-1]))
    chunked = log_probs_of_logits(Logits(low), tokens, 0.7)
    assert chunked.log_probs_BT.dtype == torch.float32
    expected, entropy = plain(low[:, :-1].double(), tokens, 0.7)
    torch.testing.assert_close(chunked.log_probs_BT.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(computed(chunked.entropy_BT).double(), entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_response_log_probs_never_copies_whole_logits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    batch, width, vocabulary, rows = 6, 9, 64, 4
    monkeypatch.setattr(token_distributions, "logits_at_once", at_once(rows * vocabulary))
    model = Logits(torch.randn(batch, width + 1, vocabulary, dtype=dtype))
    ids = torch.randint(vocabulary, (batch, 20))
    with LargestNewTensor() as forward:
        result = response_log_probs(
            model, input_ids_BS=ids, attention_mask_BS=ids, position_ids_BS=ids, response_width=width
        )
    assert set(forward.elements) >= {torch.float32}
    assert max(forward.elements.values()) <= max(rows * vocabulary, ids.numel())
    with LargestNewTensor() as backward:
        result.log_probs_BT.sum().backward()
    # Only the gradient of the logits, in the dtype of the logits, has the size of the logits.
    whole = batch * (width + 1) * vocabulary
    assert backward.elements.pop(dtype) == whole
    assert all(elements <= rows * vocabulary for elements in backward.elements.values())


LENGTHS = [(5, 4), (1, 6), (9, 1), (3, 6), (2, 0)]


def run(model: Any, batch: Experience, temperature: float) -> ResponseLogProbs:
    return response_log_probs(model, **forward_arguments(batch), temperature=temperature)


@for_each("temperature", [1.0, 0.6])
def test_response_log_probs_with_and_without_padding_equal_a_plain_forward(temperature: float) -> None:
    model = build_model(initializer_range=0.2).double().eval()
    pairs = random_samples(*LENGTHS, vocabulary=256)
    padded = run(model, batch_of(pairs), temperature)
    assert padded.log_probs_BT.shape == (len(pairs), 6)
    assert padded.log_probs_BT.isfinite().all() and computed(padded.entropy_BT).isfinite().all()
    for sample, (prompt, response) in enumerate(pairs):
        alone = run(model, batch_of([(prompt, response)]), temperature)
        length = len(response)
        assert alone.log_probs_BT.shape == (1, length)
        # All logits of the unpadded sequence, each predicting the next token.
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits
        predicting = logits[:, len(prompt) - 1 : len(prompt) - 1 + length]
        expected, entropy = plain(predicting, torch.tensor([response], dtype=torch.int64), temperature)
        for result in (alone, padded):
            row = 0 if result is alone else sample
            torch.testing.assert_close(result.log_probs_BT[row, :length], expected[0], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(computed(result.entropy_BT)[row, :length], entropy[0], rtol=1e-9, atol=1e-9)


def test_response_log_probs_gradient_ignores_padding() -> None:
    model = build_model(initializer_range=0.2).double().train()
    pairs = random_samples(*LENGTHS, vocabulary=256)

    def gradient(batches: list[Experience]) -> list[Tensor]:
        model.zero_grad()
        for batch in batches:
            (run(model, batch, 1.0).log_probs_BT * batch.response_mask).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    together, apart = gradient([batch_of(pairs)]), gradient([batch_of([pair]) for pair in pairs])
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
