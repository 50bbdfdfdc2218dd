"""Tiny random models of several families, and micro-batches of samples of many lengths."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from rl_plugins.data.experience import Experience

VOCABULARY = 97

LONGROPE_LENGTH = 16
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": LONGROPE_LENGTH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
}
"""Options of `tiny` for Phi3: other rotary frequencies for samples of more than 16 tokens."""

Samples = list[tuple[list[int], list[int]]]


def tiny(family: str, **options: Any) -> Any:
    """Return a random float64 model in evaluation mode; `options` are options of the config."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    config = getattr(transformers, f"{family}Config")(**sizes | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config).double().eval()


def random_samples(*lengths: tuple[int, int], seed: int = 1, vocabulary: int = VOCABULARY) -> Samples:
    """Return random prompts and responses with the given lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    return [(tokens(prompt), tokens(response)) for prompt, response in lengths]


def batch_of(samples: Samples) -> Experience:
    """Return the samples as a padded micro-batch."""
    prompts, responses = [prompt for prompt, _ in samples], [response for _, response in samples]
    zeros = [[0.0] * len(response) for response in responses]
    return Experience.from_samples(prompts, responses, zeros, list(range(len(samples))), 0)


def forward_arguments(batch: Experience) -> dict[str, Any]:
    """Return the arguments of `response_log_probs` for a micro-batch."""
    return {**batch.forward_inputs}
