"""Scalar heads: a new head returns 0, a trained head is restored, and scores are at the right positions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    Qwen2ForSequenceClassification,
)

from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError
from rl_plugins.models.export import save_policy
from rl_plugins.models.scalar_head import (
    last_token_scores,
    load_scalar_head,
    position_scores,
    response_scores,
    response_values,
)
from rl_plugins.models.tiny import build_model, build_tokenizer, save_tiny_policy
from rl_plugins.tests.models import scalar_head_worker
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.weights.source import ModuleWeightSource

SAMPLES = [([5, 6, 7, 8, 9], [1, 2, 3, 4]), ([50], [11, 12, 13, 14, 15, 16]), ([60, 61, 62], []), ([70, 71], [72])]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_policy(tmp_path_factory.mktemp("policy"), initializer_range=0.2))


def with_random_head(path: str, dtype: torch.dtype = torch.float64) -> Any:
    model: Any = load_scalar_head(path, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.score.weight.normal_(generator=generator)
        model.score.bias.fill_(0.7)
    return model


def inputs_of(samples: list[tuple[list[int], list[int]]]) -> dict[str, Any]:
    responses = [response for _, response in samples]
    batch = Experience.from_samples(
        [prompt for prompt, _ in samples], responses, [[0.0] * len(r) for r in responses], list(range(len(samples))), 0
    )
    return {
        "input_ids_BS": batch.input_ids,
        "attention_mask_BS": batch.attention_mask,
        "position_ids_BS": batch.position_ids,
        "response_width": batch.responses.shape[1],
    }


def lengths(samples: list[tuple[list[int], list[int]]]) -> Tensor:
    return torch.tensor([len(response) for _, response in samples])


def same_weights(one: Any, other: Any) -> bool:
    weights, expected = one.state_dict(), other.state_dict()
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_load_scalar_head_adds_a_zero_head_to_the_language_model(
    policy: str, dtype: torch.dtype, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model: Any = load_scalar_head(policy, dtype=dtype, gradient_checkpointing=True)
    assert caplog.text == ""
    assert model.training and model.is_gradient_checkpointing
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    body = build_model(initializer_range=0.2).model.to(dtype).state_dict()
    assert all(torch.equal(weight, body[name]) for name, weight in model.model.state_dict().items())
    assert model.score.weight.shape == (1, 128) and model.score.bias.shape == (1,)
    scores = response_scores(model, **inputs_of(SAMPLES))
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    assert not scores.any()


def test_load_scalar_head_turns_dropout_off(policy: str) -> None:
    model = with_random_head(policy)
    inputs = inputs_of(SAMPLES)
    assert model.training
    assert torch.equal(response_scores(model, **inputs), response_scores(model, **inputs))
    assert model.dropout.p == 0


def test_trained_scalar_head_survives_save_policy(policy: str, tmp_path: Path) -> None:
    model = with_random_head(policy, torch.float32)
    save_policy(model, ModuleWeightSource(model), build_tokenizer(), tmp_path / "trained", is_writer=True)
    again = load_scalar_head(str(tmp_path / "trained"), dtype=torch.float32, new_head=False)
    plain = AutoModelForTokenClassification.from_pretrained(tmp_path / "trained")
    assert same_weights(again, model) and same_weights(plain, model)
    assert plain.config.num_labels == 1 and plain.dropout.p == 0


def test_load_scalar_head_keeps_the_head_of_a_sequence_classifier(policy: str, tmp_path: Path) -> None:
    reward_model: Any = Qwen2ForSequenceClassification.from_pretrained(policy, num_labels=1).double().eval()
    with torch.no_grad():
        reward_model.score.weight.normal_(generator=torch.Generator().manual_seed(4))
    reward_model.save_pretrained(tmp_path)
    model: Any = load_scalar_head(str(tmp_path), dtype=torch.float64, new_head=False)
    assert torch.equal(model.score.weight, reward_model.score.weight) and not model.score.bias.any()
    scores_B = last_token_scores(response_scores(model, **inputs_of(SAMPLES)), lengths(SAMPLES))
    for score, (prompt, response) in zip(scores_B, SAMPLES, strict=True):
        expected = reward_model(torch.tensor([prompt + response])).logits[0, 0]
        torch.testing.assert_close(score, expected, rtol=1e-9, atol=1e-9)


def test_response_scores_and_values_are_at_their_positions(policy: str) -> None:
    model = with_random_head(policy)
    inputs = inputs_of(SAMPLES)
    assert position_scores(model, **{k: v for k, v in inputs.items() if k != "response_width"}).isfinite().all()
    scores_BT, values_BT = response_scores(model, **inputs), response_values(model, **inputs)
    assert scores_BT.shape == values_BT.shape == (4, 6)
    last_B = last_token_scores(scores_BT, lengths(SAMPLES))
    for row, (prompt, response) in enumerate(SAMPLES):
        # The head over the body, position by position, without padding.
        hidden = model.model(torch.tensor([prompt + response])).last_hidden_state[0]
        plain = hidden @ model.score.weight[0] + model.score.bias
        start, length = len(prompt), len(response)
        close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
        torch.testing.assert_close(scores_BT[row, :length], plain[start:], **close)
        torch.testing.assert_close(values_BT[row, :length], plain[start - 1 : -1], **close)
        torch.testing.assert_close(scores_BT[row, length:], plain[-1].expand(6 - length), **close)
        torch.testing.assert_close(last_B[row], plain[-1], **close)


@pytest.mark.parametrize("packed", [False, True])
def test_scores_of_a_model_in_bfloat16_are_not_rounded_to_bfloat16(policy: str, packed: bool) -> None:
    """A group whose scores differ by 0.02 would be a group of equal scores."""
    model = with_random_head(policy, torch.bfloat16)
    with torch.no_grad():
        model.score.bias.fill_(20.0)
    hidden: list[Tensor] = []
    model.score.register_forward_pre_hook(lambda _, arguments: hidden.append(arguments[0].detach()))
    scores = response_scores(model, **inputs_of(SAMPLES), packed=packed)
    products = hidden[-1].float() @ model.score.weight.float().T + 20.0
    assert scores.dtype == torch.float32 and float((products - scores[0, 3]).abs().min()) < 1e-5
    assert scores[0, 3] != scores[0, 3].bfloat16()


def test_last_token_scores_of_empty_responses_are_scores_of_prompts(policy: str) -> None:
    model = with_random_head(policy)
    empty: list[tuple[list[int], list[int]]] = [(prompt, []) for prompt, _ in SAMPLES]
    inputs = inputs_of(empty)
    assert inputs["response_width"] == 0
    assert response_values(model, **inputs).shape == (4, 0)
    scores_B = last_token_scores(response_scores(model, **inputs), lengths(empty))
    for score, (prompt, _) in zip(scores_B, empty, strict=True):
        torch.testing.assert_close(score, model(torch.tensor([prompt])).logits[0, -1, 0], rtol=1e-9, atol=1e-9)


def test_last_token_scores_take_responses_by_length_not_padding_token(policy: str) -> None:
    model, pad = with_random_head(policy), int(build_tokenizer().pad_token_id)
    with_pad = [([5, 6], [7, pad]), ([5, 6], [7, 8, 9])]
    scores_B = last_token_scores(response_scores(model, **inputs_of(with_pad)), lengths(with_pad))
    expected = model(torch.tensor([[5, 6, 7, pad]])).logits[0, -1, 0]
    torch.testing.assert_close(scores_B[0], expected, rtol=1e-9, atol=1e-9)


def test_response_scores_gradient_ignores_padding(policy: str) -> None:
    model = with_random_head(policy)

    def gradient(batches: list[list[tuple[list[int], list[int]]]]) -> list[Tensor]:
        model.zero_grad()
        for samples in batches:
            last_token_scores(response_scores(model, **inputs_of(samples)), lengths(samples)).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for one, other in zip(gradient([SAMPLES]), gradient([[sample] for sample in SAMPLES]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_load_scalar_head_refuses_a_folder_without_a_head(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"has no scalar head \(score.bias, score.weight\), so all its scores"):
        load_scalar_head(policy, dtype=torch.float32, new_head=False)


def test_load_scalar_head_refuses_several_labels(policy: str, tmp_path: Path) -> None:
    Qwen2ForSequenceClassification.from_pretrained(policy, num_labels=3).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="Qwen2ForSequenceClassification has 3 labels, and a scalar head has one"):
        load_scalar_head(str(tmp_path), dtype=torch.float32)


def test_load_scalar_head_refuses_models_without_token_classification(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "ffn_dim": 8,
    }
    OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=8)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no token classification model for opt"):
        load_scalar_head(str(tmp_path), dtype=torch.float32)


def test_load_scalar_head_refuses_a_head_of_another_name(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    config.num_labels = 1
    GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the head score\.weight does not fit GPT2ForTokenClassification"):
        load_scalar_head(str(tmp_path), dtype=torch.float32)


def test_load_scalar_head_refuses_missing_body_weights(policy: str, tmp_path: Path) -> None:
    model = build_model()
    weights = {name: weight for name, weight in model.state_dict().items() if ".1.mlp." not in name}
    del weights["lm_head.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match=r"3 weights of .* are missing, such as model\.layers\.1\.mlp"):
        load_scalar_head(str(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_load_scalar_head_under_zero_3_equals_whole_loading(policy: str, tmp_path: Path, precision: str) -> None:
    model = with_random_head(policy, torch.float32)
    save_policy(model, ModuleWeightSource(model), build_tokenizer(), tmp_path / "trained", is_writer=True)
    for _, printed in run_ranks(scalar_head_worker.check_rank, precision, policy, tmp_path):
        assert "MISSING" not in printed
