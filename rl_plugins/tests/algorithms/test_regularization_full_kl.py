"""The exact KL over the vocabulary: values, gradients, chunks, precision and memory."""

from __future__ import annotations

import math

import pytest
import torch

from rl_plugins.algorithms.regularization import full_kl
from rl_plugins.tests.loops import for_each


def random_logits(seed: int, tokens: int = 7, vocabulary: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, tokens, vocabulary, generator=generator, dtype=torch.float64)
    return logits[0], logits[1]


def test_full_kl_matches_a_computation_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).double().log() + torch.tensor([[7.0], [-3.0]])
    reference = torch.tensor([[0.25, 0.25, 0.5], [1 / 3, 1 / 3, 1 / 3]]).double().log()
    expected = torch.tensor([0.5 * math.log(2) - 0.25 * math.log(2), 0.0]).double()
    torch.testing.assert_close(full_kl(logits_NV=logits, ref_logits_NV=reference), expected, atol=1e-7, rtol=0)


@for_each("chunk_tokens", [1, 3, 7, 1024])
def test_full_kl_agrees_with_torch_for_any_chunk_size(chunk_tokens: int) -> None:
    logits, reference = random_logits(0)
    logits.requires_grad_()
    found = full_kl(logits_NV=logits, ref_logits_NV=reference, chunk_tokens=chunk_tokens)
    expected = torch.nn.functional.kl_div(
        reference.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(found, expected)
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weights * found).sum(), logits)
    # In closed form: p_v (log p_v - log r_v - KL).
    probs = logits.softmax(-1)
    differences = logits.log_softmax(-1) - reference.log_softmax(-1)
    torch.testing.assert_close(gradient, (weights[:, None] * probs * (differences - expected[:, None])).detach())


def test_full_kl_gradients_agree_with_finite_differences() -> None:
    logits, reference = random_logits(1, tokens=3)
    assert torch.autograd.gradcheck(
        lambda logits, ref_logits: full_kl(logits_NV=logits, ref_logits_NV=ref_logits, chunk_tokens=2),
        (logits.requires_grad_(), reference.requires_grad_()),
    )


def test_full_kl_computes_bfloat16_logits_in_float32() -> None:
    logits, reference = (x.bfloat16() for x in random_logits(2, tokens=20, vocabulary=300))
    found = full_kl(logits_NV=logits.requires_grad_(), ref_logits_NV=reference, chunk_tokens=8)
    assert found.dtype == torch.float32
    exact = full_kl(logits_NV=logits.detach().double(), ref_logits_NV=reference.double())
    torch.testing.assert_close(found.detach().double(), exact, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all()


def test_full_kl_saves_no_tensor_of_the_size_of_the_logits() -> None:
    """A tensor saved by autograd shares its storage with the logits, or has one number per token."""
    logits, reference = (x.bfloat16() for x in random_logits(3, tokens=64, vocabulary=128))
    logits.requires_grad_()
    logits_storage = {x.untyped_storage().data_ptr() for x in (logits, reference)}
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in logits_storage:
            saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = full_kl(logits_NV=logits, ref_logits_NV=reference, chunk_tokens=8)
    assert sum(saved) <= 64
    found.sum().backward()
    assert logits.grad is not None


def test_full_kl_accepts_logits_of_minus_infinity() -> None:
    logits, reference = random_logits(4, tokens=2)
    expected = full_kl(logits_NV=logits[:, :3], ref_logits_NV=reference[:, :3])
    logits[:, 3:] = -math.inf
    reference[:, 3:] = -math.inf
    found = full_kl(logits_NV=logits.requires_grad_(), ref_logits_NV=reference)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.isfinite().all() and not gradient[:, 3:].any()
    logits = logits.detach().clone()
    logits[:, 3] = 0.0
    assert full_kl(logits_NV=logits, ref_logits_NV=reference).isposinf().all()


def test_full_kl_accepts_no_tokens_and_refuses_bad_options() -> None:
    empty = torch.zeros(0, 5, requires_grad=True)
    assert full_kl(logits_NV=empty, ref_logits_NV=torch.zeros(0, 5)).shape == (0,)
    with pytest.raises(ValueError, match=r"\(2, 5\).*\(2, 6\)"):
        full_kl(logits_NV=torch.zeros(2, 5), ref_logits_NV=torch.zeros(2, 6))
    with pytest.raises(ValueError, match="chunk_tokens=0"):
        full_kl(logits_NV=torch.zeros(2, 5), ref_logits_NV=torch.zeros(2, 5), chunk_tokens=0)
