"""Random policies of known size and prompts of known length, for benchmarks of costs."""

from __future__ import annotations

import random
from pathlib import Path

import torch

PROMPT_TOKENS = 64


def save_policy(folder: Path, *, hidden_size: int, num_layers: int, intermediate_size: int, vocab_size: int) -> int:
    """Write a Qwen2 model with random weights and a byte-level tokenizer, and return the number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rl_plugins.models.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 128),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def save_vision_language_policy(folder: Path, *, pixels: int, patch: int, vocab_size: int) -> None:
    """Write a LLaVA model of 5 M parameters, with a vision tower of 3 M, and random weights.

    Args:
        folder: folder of the model.
        pixels: width and height of an image.
        patch: width and height of a patch.
        vocab_size: number of tokens of text; the next token stands for a patch.
    """
    from transformers import AutoModelForImageTextToText, LlavaConfig

    layers = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config={"model_type": "siglip_vision_model", "image_size": pixels, "patch_size": patch, **layers},
        text_config={"model_type": "qwen2", "vocab_size": vocab_size + 1, "num_key_value_heads": 4, **layers},
        image_token_index=vocab_size,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)


def image_tokens(pixels: int, patch: int, vocab_size: int) -> list[int]:
    """Return the tokens of a square image for a vision-language policy: one for each patch."""
    return [vocab_size] * (pixels // patch) ** 2


def save_28m(folder: Path) -> int:
    """Write a policy of 28 M parameters with a vocabulary of 8192."""
    return save_policy(folder, hidden_size=512, num_layers=8, intermediate_size=1408, vocab_size=8192)


def save_50m(folder: Path) -> int:
    """Write a policy of 50 M parameters, 200 MB in float32."""
    return save_policy(folder, hidden_size=768, num_layers=6, intermediate_size=2560, vocab_size=8192)


def save_250m(folder: Path) -> int:
    """Write a policy of 250 M parameters, 1 GB in float32."""
    return save_policy(folder, hidden_size=1536, num_layers=8, intermediate_size=5120, vocab_size=8192)


def save_500m(folder: Path) -> int:
    """Write a policy of 0.5 B parameters with the width, depth and vocabulary of Qwen2.5-0.5B."""
    return save_policy(folder, hidden_size=896, num_layers=24, intermediate_size=4864, vocab_size=151_936)


def save_1500m(folder: Path) -> int:
    """Write a policy of 1.5 B parameters with the width, depth and vocabulary of Qwen2.5-1.5B."""
    return save_policy(folder, hidden_size=1536, num_layers=28, intermediate_size=8960, vocab_size=151_936)


def save_prompts(path: Path, *, rows: int = 256) -> None:
    """Write prompts of `PROMPT_TOKENS` tokens with the chat template. No response matches an answer."""
    from rl_plugins.data.prepare.files import write_splits

    rng = random.Random(0)
    text_tokens = PROMPT_TOKENS - 2  # the template adds two role tokens
    splits = {
        "train": [
            {
                "data_source": "random",
                "prompt": [{"role": "user", "content": "".join(rng.choices("abcdefgh ", k=text_tokens - 1)) + "?"}],
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": "x"},
                "extra_info": {"split": "train", "index": index},
            }
            for index in range(rows)
        ]
    }
    write_splits(splits, path)
