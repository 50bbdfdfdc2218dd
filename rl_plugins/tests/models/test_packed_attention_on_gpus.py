"""Rows on a GPU: one kernel for all samples, with the results of the samples by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.models import packed_attention as module
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.packed_attention import Stretches, attend_at_once, boundaries, has_kernel, use_packed_attention
from rl_plugins.tests.fake_cuda import FakeCuda
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.plain_varlen import PlainVarlen
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny

# A sample, then a prompt of 4 tokens with three responses of 2, 1 and 3 tokens.
POSITIONS = [0, 1, 2, 0, 1, 2, 3, 4, 5, 4, 4, 5, 6]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> PlainVarlen:
    """Stand-in for the kernel."""
    plain = PlainVarlen()
    monkeypatch.setattr(module, "varlen_attn", plain)
    return plain


def packed(family: str = "Qwen2", **options: Any) -> Any:
    model = tiny(family, attn_implementation="sdpa", **options)
    use_packed_attention(model)
    return model


def shared_prompts() -> dict[str, Any]:
    prompts = random_samples((5, 4), (1, 6), (7, 1), (3, 4))
    return forward_arguments(batch_of([*prompts, (prompts[0][0], [3, 4]), (prompts[2][0], [5]), (prompts[0][0], [])]))


def log_probs_and_gradients(model: Any, **options: Any) -> list[Tensor]:
    arguments = shared_prompts()
    model.zero_grad()
    log_probs_BT = response_log_probs(model, **arguments, **options).log_probs_BT
    mask = arguments["attention_mask_BS"][:, -log_probs_BT.shape[1] :].bool()
    log_probs_BT[mask].square().sum().backward()
    return [log_probs_BT[mask], *(parameter.grad.clone() for parameter in model.parameters())]


@for_each(
    ("family", "options", "windows"),
    [
        ("Qwen2", {}, {(-1, 0)}),
        ("Qwen2", {"num_key_value_heads": 4}, {(-1, 0)}),
        ("Mistral", {"sliding_window": 3}, {(2, 0)}),
        # The kernel caps no scores.
        (
            "Gemma2",
            {"query_pre_attn_scalar": 5, "sliding_window": 3, "attn_logit_softcapping": None},
            {(-1, 0), (2, 0)},
        ),
    ],
)
def test_packed_sdpa_by_the_kernel_equals_samples_by_themselves(
    kernel: PlainVarlen,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    options: dict[str, Any],
    windows: set[tuple[int, int]],
) -> None:
    model = packed(family, **options)
    kernel.calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(module, "has_kernel", lambda query, value: True)
        found = log_probs_and_gradients(model, packed=True)
    assert {call.window_size for call in kernel.calls} == windows
    assert {call.enable_gqa for call in kernel.calls} == {options.get("num_key_value_heads") != 4}
    kernel.calls.clear()
    expected = log_probs_and_gradients(model, packed=True)
    assert not kernel.calls
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def waits_of_a_pass(layers: int, dtype: torch.dtype, positions: list[int]) -> list[str]:
    """Return the operations of a forward and a backward pass with a wait of the host for the fake GPU."""
    with FakeCuda() as gpu:
        model = packed(num_hidden_layers=layers).to("cuda", dtype)
        positions_M = torch.tensor(positions, device="cuda")
        stretches = boundaries(positions_M)
        gpu.waits.clear()
        row = {"input_ids": positions_M[None], "position_ids": positions_M[None]}
        model(**row, **stretches, use_cache=False).logits.sum().backward()
        return gpu.waits


def test_packed_sdpa_waits_for_a_gpu_in_no_layer(kernel: PlainVarlen) -> None:
    one, three = (waits_of_a_pass(layers, torch.bfloat16, POSITIONS) for layers in (1, 3))
    assert one == three
    assert len(kernel.calls) == 4
    for call in kernel.calls:
        assert [starts.tolist() for starts in call.starts] == [[0, 3, 4, 10, 13], [0, 3, 8, 14, 21]]
        assert {starts.dtype for starts in call.starts} == {torch.int32} and call.longest == (6, 7)


def test_packed_sdpa_in_float32_waits_for_a_gpu_in_no_layer(kernel: PlainVarlen) -> None:
    positions = [0, 1, 2, 0, 1, 0, 1]
    one, three = (waits_of_a_pass(layers, torch.float32, positions) for layers in (1, 3))
    assert one == three
    assert not kernel.calls


def test_attend_at_once_calls_the_operator_of_torch() -> None:
    """Tensors without data run through the operator of torch, and through its gradient."""
    stretches = boundaries(torch.tensor(POSITIONS))["stretches"]
    begin_q, begin_k = (starts.to("meta") for starts in stretches.starts)
    query, key, value = (
        torch.empty(tokens, heads, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for tokens, heads in ((13, 4), (21, 2), (21, 2))
    )
    for window in (None, 3):
        output = attend_at_once(query, key, value, Stretches(stretches.runs, (begin_q, begin_k)), window, 0.5)
        gradients = torch.autograd.grad(output.sum(), (query, key, value))
        assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_has_kernel_takes_heads_of_16_bits_on_a_gpu_from_ampere_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def heads(dtype: torch.dtype, width: int, device: str = "cuda") -> Tensor:
        return torch.zeros(1, 1, width, dtype=dtype, device=device)

    for dtype in (torch.bfloat16, torch.float16):
        assert not has_kernel(heads(dtype, 64, "cpu"), heads(dtype, 64, "cpu"))
    with FakeCuda():
        for dtype in (torch.bfloat16, torch.float16):
            assert all(has_kernel(heads(dtype, width), heads(dtype, width)) for width in (8, 64, 128, 256))
            assert not any(has_kernel(heads(dtype, width), heads(dtype, width)) for width in (20, 264))
            assert not has_kernel(heads(dtype, 64), heads(dtype, 32))
        assert not has_kernel(heads(torch.float32, 64), heads(torch.float32, 64))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert not has_kernel(heads(torch.bfloat16, 64), heads(torch.bfloat16, 64))
