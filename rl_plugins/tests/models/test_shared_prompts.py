"""Samples of one prompt in a row: the model computes the prompt once, and no result changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_plugins.data.experience import Experience, computed
from rl_plugins.models import packing as module
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.packed_attention import boundaries, use_packed_attention
from rl_plugins.models.packing import first_of_prompt, pack
from rl_plugins.models.scalar_head import load_scalar_head, response_scores, response_values
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny

# The length of each prompt, and the lengths of its responses.
GROUPS = [(5, [4, 0, 4, 7]), (1, [3, 3]), (6, [2]), (3, [0, 0]), (5, [1, 6])]
# The samples of a group need not be neighbours.
ORDER = [3, 10, 0, 4, 7, 1, 9, 5, 2, 8, 6]

OPTIONS: dict[str, dict[str, Any]] = {
    "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "sliding_window": 3},
    "Mistral": {"sliding_window": 3},
}


def grouped(groups: list[tuple[int, list[int]]] = GROUPS) -> list[tuple[list[int], list[int]]]:
    samples = []
    for number, (prompt, responses) in enumerate(groups):
        drawn = random_samples(*[(prompt, response) for response in responses], seed=number)
        samples += [(drawn[0][0], response) for _, response in drawn]
    return samples


def batch() -> Experience:
    samples = grouped()
    return batch_of([samples[place] for place in ORDER])


def packed(family: str = "Qwen2", **options: Any) -> Any:
    model = tiny(family, attn_implementation="sdpa", **OPTIONS.get(family, {}), **options)
    use_packed_attention(model)
    return model


def rows_of(model: Any) -> list[Tensor]:
    """Record the token ids of all following calls of the model."""
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args, inputs: seen.append(inputs["input_ids"]), with_kwargs=True)
    return seen


def assert_same(found: list[list[Tensor]], tolerance: float) -> None:
    """Compare numbers, and then gradients."""
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def tokens_once(groups: list[tuple[int, list[int]]]) -> int:
    return sum(prompt + sum(responses) for prompt, responses in groups)


@pytest.mark.parametrize(
    ("family", "tolerance"),
    # Mistral and Gemma 2 have a window of three tokens, in all layers and in one of two. Gemma 2 has float32 norms.
    [("Qwen2", 1e-10), ("Qwen3", 1e-10), ("Llama", 1e-10), ("Mistral", 1e-4), ("Granite", 1e-4), ("Gemma2", 1e-4)],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prompts_give_log_probs_and_gradients_of_padded_samples(
    family: str, tolerance: float, checkpointing: bool
) -> None:
    samples, found = batch(), []
    mask = samples.response_mask.bool()
    weights_N = torch.randn(int(mask.sum()), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for is_packed in (False, True):
        model = packed(family)
        if checkpointing:
            model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        rows = rows_of(model)
        result = response_log_probs(
            model, **forward_arguments(samples), temperature=0.7, entropy_gradient=True, packed=is_packed
        )
        (weights_N * result.log_probs_BT[mask] + computed(result.entropy_BT)[mask]).sum().backward()
        found.append([result.log_probs_BT[mask], *(parameter.grad for parameter in model.parameters())])
    assert rows[-1].shape == (1, tokens_once(GROUPS))
    assert_same(found, tolerance)


def test_shared_prompts_give_scores_and_values_of_padded_samples(tmp_path: Path) -> None:
    path = str(save_tiny_policy(tmp_path, hidden_size=32, intermediate_size=48, initializer_range=0.2))
    model: Any = load_scalar_head(path, dtype=torch.float64)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    samples, rows = batch(), rows_of(model)
    for function, mask in ((response_values, samples.response_mask.bool()), (response_scores, ...)):
        found = []
        for is_packed in (False, True):
            model.zero_grad()
            numbers = function(model, **forward_arguments(samples), packed=is_packed)[mask]
            numbers.square().sum().backward()
            found.append([numbers, *(parameter.grad for parameter in model.parameters())])
        assert rows[-1].shape == (1, tokens_once(GROUPS))
        assert_same(found, 1e-9)


def test_shared_prompts_under_autocast() -> None:
    model, batch_ = packed().float(), batch()
    mask = batch_.response_mask.bool()
    exact = response_log_probs(model, **forward_arguments(batch_), packed=True).log_probs_BT[mask]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = response_log_probs(model, **forward_arguments(batch_), packed=True).log_probs_BT[mask]
    assert 0 < float((rounded - exact).abs().max().detach()) < 0.1 * float(exact.abs().max().detach())


def test_pack_makes_one_row_with_shared_prompts() -> None:
    samples = batch_of([([5, 6], [7]), ([1], [2, 3]), ([5, 6], [8, 9]), ([5, 6], [4, 4])])
    arguments = forward_arguments(samples)
    del arguments["image_inputs_B"]
    row = pack(packed(), **arguments)
    assert row.inputs.arguments["input_ids"].tolist() == [[5, 6, 7, 8, 9, 4, 4, 1, 2, 3]]
    assert row.inputs.arguments["position_ids"].tolist() == [[0, 1, 2, 2, 3, 2, 3, 0, 1, 2]]
    # 7, 8 and the first 4 are predicted at 6; 2 at 1.
    assert row.predicting(samples.attention_mask, samples.responses.shape[1]).tolist() == [1, 7, 8, 1, 3, 1, 5]
    # [5 6 7], [1 2 3], [5 6 8 9], [5 6 4 4], the shortest first: two whole samples, then two responses.
    stretches = row.inputs.arguments["stretches"]
    assert stretches.runs == ((3, 3, 2), (2, 4, 2)) and stretches.longest == (3, 4)
    assert [starts.tolist() for starts in stretches.starts] == [[0, 3, 6, 8, 10], [0, 3, 6, 10, 14]]
    assert stretches.places.queries.tolist() == [0, 1, 2, 7, 8, 9, 3, 4, 5, 6]
    assert stretches.places.keys.tolist() == [0, 1, 2, 7, 8, 9, 0, 1, 3, 4, 0, 1, 5, 6]
    assert stretches.places.row.tolist() == [0, 1, 2, 6, 7, 8, 9, 3, 4, 5]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=4)), min_size=1))
def test_boundaries_give_whole_samples_and_restore_the_row(groups: list[tuple[int, list[int]]]) -> None:
    positions = [
        position
        for prompt, responses in groups
        for number, response in enumerate(responses)
        for position in range(prompt if number else 0, prompt + response)
    ]
    found = boundaries(torch.tensor(positions))["stretches"]
    own, whole = (starts.diff().tolist() for starts in found.starts)
    assert [pair for *pair, count in found.runs for _ in range(count)] == [
        list(pair) for pair in zip(own, whole, strict=True)
    ]
    assert found.longest == (max(own), max(whole)) and sum(own) == len(positions)
    if found.places is None:
        assert own == whole
        return
    # Every sample has its positions from 0, and its last tokens are queries.
    assert torch.tensor(positions)[found.places.keys].tolist() == [place for length in whole for place in range(length)]
    samples, attending = found.places.keys.split(whole), found.places.queries.split(own)
    for sample, stretch in zip(samples, attending, strict=True):
        assert torch.equal(sample[-len(stretch) :], stretch)
    assert torch.equal(found.places.queries[found.places.row], torch.arange(len(positions)))


def test_first_of_prompt_compares_real_tokens() -> None:
    prompts = torch.tensor([[9, 5, 6], [0, 5, 6], [9, 5, 6], [5, 6, 6]])
    is_token = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]).bool()
    assert first_of_prompt(prompts, is_token).tolist() == [0, 0, 2, 3]
    assert first_of_prompt(prompts[:0, :0], is_token[:0, :0]).tolist() == []


def test_pack_tests_a_model_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed(attention_dropout=0.5).train()
    rows = rows_of(model)
    response_log_probs(model, **forward_arguments(batch()), packed=True)
    assert rows[-1].shape == (1, tokens_once(GROUPS)) and model.training


def test_shared_prompts_are_off_for_a_model_without_position_ids(caplog: pytest.LogCaptureFixture) -> None:
    """The model computes positions from places in the row, counted from the start of a sample."""
    model = packed()
    inner = model.model.rotary_emb.forward

    def by_place(hidden: Tensor, position_ids: Tensor) -> Any:
        begins = (position_ids[0] == 0).nonzero().flatten()
        places = torch.arange(position_ids.shape[1])
        return inner(hidden, (places - begins[torch.searchsorted(begins, places, right=True) - 1])[None])

    samples = batch()
    padded = response_log_probs(model, **forward_arguments(samples)).log_probs_BT
    model.model.rotary_emb.forward = by_place
    rows = rows_of(model)
    assert "Qwen2ForCausalLM" not in caplog.text
    found = response_log_probs(model, **forward_arguments(samples), packed=True).log_probs_BT
    assert "Qwen2ForCausalLM cannot share a prompt among the samples of a row" in caplog.text
    assert not module.shares_prompts(model)
    assert rows[-1].shape == (1, int(samples.attention_mask.sum()))
    mask = samples.response_mask.bool()
    torch.testing.assert_close(found[mask], padded[mask], rtol=1e-10, atol=1e-10)


def test_shared_prompts_are_off_without_packed_attention() -> None:
    model = tiny("Qwen2", attn_implementation="sdpa")
    rows = rows_of(model)
    response_log_probs(model, **forward_arguments(batch()), packed=True)
    assert rows[-1].shape == (1, int(batch().attention_mask.sum()))
    assert not module.shares_prompts(model) and module.shares_prompts(packed())
