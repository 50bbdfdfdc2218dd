"""packed_sdpa: rows without mask and padding, and sdpa of transformers for all other inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from benchmarks.tiny_vision import save_tiny_vision
from rl_plugins.models import packed_attention as module
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.log_probs import response_log_probs
from rl_plugins.models.packed_attention import has_packed_attention, use_packed_attention
from rl_plugins.models.scalar_head import load_scalar_head, response_scores, response_values
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.tests.models.samples import batch_of, forward_arguments, random_samples, tiny

# Two samples have the same length.
LENGTHS = [(5, 4), (1, 6), (7, 1), (1, 1), (3, 4), (2, 0)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes of the queries, and masks, in calls of the attention of transformers."""
    seen: list[tuple[tuple[int, ...], Any]] = []
    inner = module.sdpa_attention_forward

    def recording(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        seen.append((tuple(query.shape), mask))
        return inner(layer, query, key, value, mask, **options)

    monkeypatch.setattr(module, "sdpa_attention_forward", recording)
    return seen


def packed(family: str = "Qwen2", **options: Any) -> Any:
    model = tiny(family, attn_implementation="sdpa", **options)
    use_packed_attention(model)
    assert has_packed_attention(model)
    return model


def test_packed_sdpa_cuts_a_row_into_samples_without_a_mask(calls: list[Any]) -> None:
    batch = batch_of(sorted(random_samples(*LENGTHS), key=lambda sample: len(sample[0]) + len(sample[1])))
    response_log_probs(packed(num_hidden_layers=1), **forward_arguments(batch), packed=True)
    row = [(shape, mask) for shape, mask in calls if mask is None][-5:]
    # [samples, heads, tokens, width] for samples of 2, 2, 7, 7, 8 and 9 tokens.
    assert [shape for shape, _ in row[-4:]] == [(2, 4, 2, 8), (2, 4, 7, 8), (1, 4, 8, 8), (1, 4, 9, 8)]


def test_packed_sdpa_runs_padded_batches_and_generation_like_sdpa() -> None:
    plain, own = tiny("Qwen2", attn_implementation="sdpa"), packed()
    batch = batch_of(random_samples(*LENGTHS))
    one, other = (response_log_probs(model, **forward_arguments(batch)).log_probs_BT for model in (plain, own))
    assert torch.equal(one, other)
    ids = torch.arange(9)[None]
    assert torch.equal(plain(ids).logits, own(ids).logits)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(plain.generate(ids, **options), own.generate(ids, **options))


def test_packed_sdpa_caps_scores_like_eager_attention() -> None:
    # A cap that changes the scores, in layers with and without a window.
    options = {"attn_logit_softcapping": 0.7, "sliding_window": 3, "query_pre_attn_scalar": 8}
    samples = random_samples(*LENGTHS)
    # The samples of a prompt share its tokens in a row.
    samples.append((samples[0][0], samples[1][1]))

    def alone(model: Any) -> Tensor:
        found = []
        for prompt, response in samples:
            logits_TV = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            found.append(logits_TV.log_softmax(dim=-1).gather(-1, torch.tensor(response).long()[:, None]).squeeze(-1))
        return torch.cat(found)

    eager = tiny("Gemma2", attn_implementation="eager", **options)
    expected = alone(eager)
    without_cap = alone(tiny("Gemma2", attn_implementation="eager", **options | {"attn_logit_softcapping": None}))
    assert float((without_cap - expected).abs().max()) > 1e-2
    batch = batch_of(samples)
    mask = batch.response_mask.bool()
    for is_row in (False, True):
        own = packed("Gemma2", **options)
        found = response_log_probs(own, **forward_arguments(batch), packed=is_row).log_probs_BT[mask]
        # Eager attention computes the softmax in float32.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        gradients = []
        for model, log_probs_N in ((eager, expected), (own, found)):
            (gradient,) = torch.autograd.grad(
                log_probs_N.sum(), [model.model.layers[0].self_attn.k_proj.weight], retain_graph=True
            )
            gradients.append(gradient)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen2", "Mistral"])
def test_packed_sdpa_cuts_a_row_by_position_ids_alone(family: str) -> None:
    """A row may be given to a model of transformers with positions only."""
    options = {"sliding_window": 3} if family == "Mistral" else {}
    own = packed(family, **options)
    ids = torch.randint(97, (1, 10), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]])
    together = own(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    apart = [own(input_ids=part, use_cache=False).logits[0] for part in ids.split([4, 3, 3], dim=1)]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-10, atol=1e-10)


def test_packed_sdpa_with_gradient_checkpointing_has_the_same_gradients() -> None:
    batch = batch_of(random_samples(*LENGTHS))
    mask = batch.response_mask.bool()
    found = []
    for checkpointing, is_packed in ((False, False), (True, True)):
        model = packed().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        log_probs_BT = response_log_probs(model, **forward_arguments(batch), packed=is_packed).log_probs_BT
        log_probs_BT[mask].square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_use_packed_attention_changes_only_models_with_sdpa() -> None:
    for model in (
        tiny("Qwen2", attn_implementation="eager"),
        # A layer gets no information about chunked attention.
        tiny("Qwen2", layer_types=["chunked_attention", "full_attention"]),
        torch.nn.Linear(2, 2),
    ):
        use_packed_attention(model)
        assert not has_packed_attention(model)


def test_use_packed_attention_keeps_masks_in_which_tokens_of_an_image_see_each_other(tmp_path: Path) -> None:
    for attention, is_packed in (("vision", False), (None, True)):
        model = save_tiny_vision("llava", tmp_path / str(attention))
        # As in the text models of Gemma 4.
        model.config.text_config.use_bidirectional_attention = attention
        use_packed_attention(model)
        assert has_packed_attention(model) == is_packed


def test_loaded_models_have_packed_attention_and_save_without(tmp_path: Path) -> None:
    path = str(save_tiny_policy(tmp_path / "policy", hidden_size=32, intermediate_size=48))
    for model in (load_causal_lm(path, dtype=torch.float32), load_scalar_head(path, dtype=torch.float32)):
        assert has_packed_attention(model)
    model.save_pretrained(tmp_path / "saved")
    assert "packed_sdpa" not in json.dumps(AutoConfig.from_pretrained(tmp_path / "saved").to_dict())


def test_packed_scores_and_values_equal_padded_scores_and_values(tmp_path: Path) -> None:
    path = str(save_tiny_policy(tmp_path, hidden_size=32, intermediate_size=48, initializer_range=0.2))
    model: Any = load_scalar_head(path, dtype=torch.float64)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    batch = batch_of(random_samples(*LENGTHS))
    for function, mask in ((response_values, batch.response_mask.bool()), (response_scores, ...)):
        found = []
        for is_packed in (False, True):
            model.zero_grad()
            numbers = function(model, **forward_arguments(batch), packed=is_packed)[mask]
            numbers.square().sum().backward()
            found.append([numbers, *(parameter.grad for parameter in model.parameters())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
