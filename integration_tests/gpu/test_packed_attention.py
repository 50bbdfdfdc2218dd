"""Rows of samples that share prompts give on a GPU what each sample gives by itself, with the kernels that it has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from integration_tests.gpu import NEEDS_CUDA
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny

pytestmark = NEEDS_CUDA


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_shared_prompts_change_no_log_probs(dtype: torch.dtype, tolerance: float, window: int | None) -> None:
    batch = batch_of(random_samples((6, 4), (6, 7), (6, 1), (6, 4)))
    batch.prompts[:] = batch.prompts[0]
    family, options = ("Mistral", {"sliding_window": window}) if window else ("Qwen2", {})
    model = tiny(family, attn_implementation="sdpa", initializer_range=0.1, **options).to("cuda", dtype)
    use_packed_attention(model)
    arguments: dict[str, Any] = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in forward_arguments(batch).items()
    }
    gradients, mask = [], batch.response_mask.bool().cuda()
    for packed in (False, True):
        model.zero_grad()
        log_probs = response_log_probs(model, **arguments, packed=packed).log_probs_BT[mask]
        log_probs.sum().backward()
        gradients.append([log_probs.detach(), *(parameter.grad for parameter in model.parameters())])
    for alone, together in zip(*gradients, strict=True):
        difference = (together.double() - alone.double()).norm()
        assert difference <= tolerance * alone.double().norm() + 1e-6
