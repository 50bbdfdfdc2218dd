"""Packed samples against padded samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.tiny_families import save_tiny_family
from rl_plugins.data.experience import computed
from rl_plugins.errors import ConfigError
from rl_plugins.models import log_probs as module
from rl_plugins.models.folder import check_packing
from rl_plugins.models.log_probs import ResponseLogProbs, response_log_probs
from rl_plugins.models.packed_attention import use_packed_attention
from rl_plugins.models.packing import pack
from rl_plugins.models.scalar_head import response_values
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.models.memory import at_once
from rl_plugins.tests.models.samples import (
    VOCABULARY,
    batch_of,
    forward_arguments,
    random_samples,
    tiny,
)

LENGTHS = [(5, 4), (1, 6), (7, 1), (1, 1), (3, 6), (2, 0)]

OPTIONS: dict[str, dict[str, Any]] = {
    "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "sliding_window": 3},
    "Mistral": {"sliding_window": 3},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}


def gradients(model: Any, result: ResponseLogProbs, mask: Tensor) -> list[Tensor]:
    model.zero_grad()
    weights = torch.randn(2, int(mask.sum()), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (weights[0] * result.log_probs_BT[mask] + weights[1] * computed(result.entropy_BT)[mask]).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("family", "attention", "dtype", "tolerance"),
    [
        ("Qwen2", "sdpa", torch.float64, 1e-10),
        ("Qwen2", "packed_sdpa", torch.float64, 1e-10),
        ("Llama", "packed_sdpa", torch.float64, 1e-10),
        ("Granite", "packed_sdpa", torch.float64, 1e-10),
        # A window of three tokens, in all layers and in one of two.
        ("Mistral", "packed_sdpa", torch.float64, 1e-10),
        ("Gemma2", "packed_sdpa", torch.float64, 1e-4),
        # The gate of the shared expert has one output, as a scalar head has. Experts take no float64.
        ("Qwen2Moe", "packed_sdpa", torch.float32, 2e-4),
        ("Llama", "sdpa", torch.float64, 1e-10),
        ("Granite", "sdpa", torch.float64, 1e-10),
        # Eager attention computes the softmax in float32, and Gemma 2 computes norms in float32.
        ("Qwen2", "eager", torch.float32, 2e-4),
        ("Llama", "eager", torch.float32, 2e-4),
        ("Gemma2", "sdpa", torch.float64, 1e-4),
    ],
)
@for_each("rows", [2, 1000])
def test_packed_log_probs_and_gradients_equal_padded_log_probs(
    monkeypatch: pytest.MonkeyPatch, rows: int, family: str, attention: str, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(module, "logits_at_once", at_once(rows * VOCABULARY))
    model = tiny(family, attn_implementation=attention, **OPTIONS.get(family, {})).to(dtype)
    batch = batch_of(random_samples(*LENGTHS))
    mask = batch.response_mask.bool()
    seen = []
    model.register_forward_pre_hook(lambda _, args, inputs: seen.append(inputs), with_kwargs=True)
    padded, packed = (
        response_log_probs(
            model,
            **forward_arguments(batch),
            temperature=0.7,
            sum_pi_squared=True,
            entropy_gradient=True,
            packed=packed,
        )
        for packed in (False, True)
    )
    assert seen[-1]["input_ids"].shape == (1, int(batch.attention_mask.sum()))
    assert "attention_mask" not in seen[-1]
    for name in ("log_probs_BT", "entropy_BT", "sum_pi_squared_BT"):
        one, other = getattr(padded, name), getattr(packed, name)
        assert other.shape == batch.responses.shape and other.isfinite().all()
        torch.testing.assert_close(one[mask], other[mask], rtol=tolerance, atol=tolerance)
    for one, other in zip(gradients(model, padded, mask), gradients(model, packed, mask), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Phimoe", {"sliding_window": 3, "num_local_experts": 4}),
        ("Qwen2Moe", {**OPTIONS["Qwen2Moe"], "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}),
        ("Doge", {}),
    ],
)
def test_packed_log_probs_have_the_mask_of_the_family(family: str, options: dict[str, Any]) -> None:
    # Experts take no float64.
    model = tiny(family, attn_implementation="sdpa", **options).float()
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.A"):
            torch.nn.init.normal_(parameter)
    use_packed_attention(model)
    batch = batch_of(random_samples(*LENGTHS))
    padded, packed = (
        response_log_probs(model, **forward_arguments(batch), packed=packed).log_probs_BT for packed in (False, True)
    )
    mask = batch.response_mask.bool()
    torch.testing.assert_close(padded[mask], packed[mask], rtol=1e-3, atol=1e-3)


def test_pack_makes_one_row_with_positions_per_sample() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7, 0], [1, 2, 3, 4, 8, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    row = pack(tiny("Llama"), input_ids_BS=ids, attention_mask_BS=mask, position_ids_BS=positions)
    assert row.inputs.arguments["input_ids"].tolist() == [[5, 6, 7, 1, 2, 3, 4, 8, 9]]
    assert row.inputs.arguments["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4, 5]]
    # 7 is predicted at 6; 8 and 9 at 4 and 8.
    assert row.predicting(mask, response_width=2).tolist() == [1, 6, 7]


def test_response_log_probs_refuses_to_pack_a_recurrent_model() -> None:
    """The state of a recurrent model runs through the row, from sample to sample."""
    model = tiny("RecurrentGemma", lru_width=32, attention_window_size=16, block_types=["recurrent", "attention"])
    batch = batch_of(random_samples(*LENGTHS))
    message = "RecurrentGemmaForCausalLM .*lets packed samples see each other"
    with pytest.raises(ConfigError, match=rf"{message}.*set packing=False .*batch\.packing=false"):
        response_log_probs(model, **forward_arguments(batch), packed=True)


def test_check_packing_refuses_a_model_whose_packed_samples_see_each_other(tmp_path: Path) -> None:
    model = save_tiny_family("lfm2", tmp_path)
    batch = batch_of(random_samples(*LENGTHS))
    with pytest.raises(ConfigError, match="lets packed samples see each other"):
        response_log_probs(model, **forward_arguments(batch), packed=True)
    with pytest.raises(ConfigError, match=r"layers of the kind .* set batch\.packing=false"):
        check_packing("model.path", str(tmp_path))


def test_packed_log_probs_of_one_sample_equal_padded_log_probs() -> None:
    model, batch = tiny("Llama"), batch_of(random_samples((4, 5)))
    padded = response_log_probs(model, **forward_arguments(batch))
    packed = response_log_probs(model, **forward_arguments(batch), packed=True)
    torch.testing.assert_close(packed.log_probs_BT, padded.log_probs_BT, rtol=1e-10, atol=1e-10)


class RunningMean(nn.Module):
    """A causal model with a state across all samples, under a head of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.score = nn.Linear(4, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.score(self.embedding(input_ids).cumsum(dim=1)))


def test_response_values_refuses_to_pack_a_recurrent_critic_with_a_zero_head() -> None:
    """The outputs of the head are equal, and the inputs of the head are not."""
    batch = batch_of(random_samples(*LENGTHS))
    with pytest.raises(ConfigError, match=r"RunningMean .*lets packed samples see each other.*batch\.packing=false"):
        response_values(RunningMean(), **forward_arguments(batch), packed=True)
