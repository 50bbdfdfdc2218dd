"""The tiny policy: `from_pretrained` restores the saved files, and the vocabulary is fit for arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rl_plugins.errors import ConfigError
from rl_plugins.models.tiny import (
    END_TOKEN,
    PAD_TOKEN,
    ROLE_TOKENS,
    build_model,
    build_tokenizer,
    save_tiny_policy,
)
from rl_plugins.tests.loops import for_each

QUESTION = [{"role": "user", "content": "17+25"}]
DIALOGUE = [{"role": "system", "content": "Add."}, *QUESTION, {"role": "assistant", "content": "42"}]
TEXTS = ["17+25", "  two  spaces\n\n", "it's Größe 数学 🙂", "\x00\x7f\t", "<|user|>1<|end|>", "a , b .", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"), seed=3)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


def test_auto_tokenizer_restores_build_tokenizer(tokenizer: Any) -> None:
    built = build_tokenizer()
    assert type(tokenizer) is type(built)
    assert tokenizer.get_vocab() == built.get_vocab()
    assert len(tokenizer) == 261
    assert sorted(tokenizer.all_special_tokens) == sorted([PAD_TOKEN, END_TOKEN, *ROLE_TOKENS])
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|end|>", "<|pad|>", None)
    assert tokenizer.chat_template == built.chat_template
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == built(text)["input_ids"]


@for_each("text", TEXTS)
def test_tokenizer_decodes_any_encoded_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_has_one_token_per_digit_and_role(tokenizer: Any) -> None:
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>17+25<|assistant|>"
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer.encode(prompt)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "1", "7", "+", "2", "5", "<|assistant|>"]
    assert tokenizer.tokenize("0123456789") == list("0123456789")


def test_chat_template_ends_and_masks_the_answer(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(DIALOGUE, tokenize=False)
    assert text == "<|system|>Add.<|user|>17+25<|assistant|>42<|end|>"
    encoded = tokenizer.apply_chat_template(DIALOGUE, return_dict=True, return_assistant_tokens_mask=True)
    spoken = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.convert_ids_to_tokens(spoken) == ["4", "2", "<|end|>"]
    assert tokenizer.decode(spoken, skip_special_tokens=True) == "42"


def test_save_tiny_policy_restores_build_model(folder: Path, tokenizer: Any) -> None:
    built, loaded = build_model(seed=3), AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    assert loaded.config.vocab_size == len(tokenizer)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    expected = built.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_save_tiny_policy_writes_a_complete_folder(folder: Path, tokenizer: Any) -> None:
    present = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= present
    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.model_max_length == 256


def test_build_model_is_small_by_default() -> None:
    assert sum(p.numel() for p in build_model().parameters()) < 600_000


def test_build_model_seed_sets_weights_and_keeps_the_random_state() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, again, other = (build_model(seed=seed).state_dict()["lm_head.weight"] for seed in (0, 0, 1))
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"hidden_size": 100}, "hidden_size"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_build_model_refuses_impossible_sizes(sizes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_model(**sizes)


def test_save_tiny_policy_refuses_a_file_in_the_way(tmp_path: Path) -> None:
    file = tmp_path / "policy"
    file.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        save_tiny_policy(file)
