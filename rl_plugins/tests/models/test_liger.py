"""Models with kernels of Liger compute the same log-probs and gradients. `plain_liger` stands for the library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_plugins.errors import ConfigError
from rl_plugins.models.liger import has_liger, use_liger
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.plain_liger import PlainLiger, plain_liger
from rl_plugins.tests.models.samples import VOCABULARY, batch_of, forward_arguments, random_samples, tiny

LENGTHS = [(5, 4), (1, 6), (7, 1), (3, 6), (2, 0)]


@pytest.fixture
def liger() -> Iterator[PlainLiger]:
    with plain_liger() as calls:
        yield calls


def with_bias() -> Any:
    model = tiny("Qwen2").float()
    model.lm_head = nn.Linear(32, VOCABULARY)
    return model


def results(model: Any, **options: Any) -> list[Tensor]:
    """Return the log-probs of all response tokens, and the gradients of their sum with a weight for each token."""
    batch = batch_of(random_samples(*LENGTHS))
    log_probs = response_log_probs(model, **forward_arguments(batch), **options).log_probs_BT[
        batch.response_mask.bool()
    ]
    weights = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(2))
    return [log_probs.detach(), *torch.autograd.grad((weights * log_probs).sum(), list(model.parameters()))]


@for_each("packed", [False, True])
@for_each("make", [lambda: tiny("Qwen2", tie_word_embeddings=True).float(), with_bias])
def test_response_log_probs_by_the_fused_head_equal_the_chunked_head(make: Any, packed: bool) -> None:
    torch.manual_seed(0)
    model = make()
    use_packed_attention(model)
    expected = results(model, packed=packed, entropy=False)
    with plain_liger() as liger:
        use_liger(model, "policy")
        found = results(model, packed=packed, entropy=False)
    assert has_liger(model) and liger.options == [{"cross_entropy": False, "fused_linear_cross_entropy": False}]
    assert liger.heads == [(torch.float32, torch.float32)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_response_log_probs_use_the_fused_head_for_log_probs_alone(liger: PlainLiger) -> None:
    model = tiny("Qwen2").float()
    arguments = forward_arguments(batch_of(random_samples(*LENGTHS)))
    assert response_log_probs(model, **arguments, entropy=False).entropy_BT is None
    use_liger(model, "policy")
    others: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "entropy": False},
        {"top_k": 2, "entropy": False},
        {"sum_pi_squared": True, "entropy": False},
        {"tokens_BTK": torch.zeros(len(LENGTHS), 6, 2, dtype=torch.int64), "entropy": False},
    ]
    for options in others:
        result = response_log_probs(model, **arguments, **options)
        assert (result.entropy_BT is None) == ("entropy" in options)
    # No token.
    response_log_probs(model, **forward_arguments(batch_of(random_samples((3, 0), (2, 0)))), entropy=False)
    assert not liger.heads
    assert response_log_probs(model, **arguments, entropy=False).entropy_BT is None
    assert len(liger.heads) == 1


def test_fused_head_computes_in_the_dtype_of_autocast(liger: PlainLiger) -> None:
    model = tiny("Qwen2").float()
    use_liger(model, "policy")
    with torch.autocast("cpu", torch.bfloat16):
        results(model, entropy=False)
    assert liger.heads == [(torch.bfloat16, torch.bfloat16)]


def test_use_liger_refuses_a_family_without_kernels(liger: PlainLiger) -> None:
    with pytest.raises(ConfigError, match=r"Liger has no kernels for the teacher, a cohere: leave LigerKernels out"):
        use_liger(tiny("Cohere"), "teacher")
    with pytest.raises(ConfigError, match="no kernels for the critic, a Linear"):
        use_liger(nn.Linear(2, 2), "critic")
