"""Sizes of a model from its config.json, as far as memory and time depend on them.

The model is a decoder as transformers builds it: blocks of attention and a gated MLP, rotary positions, RMS norms.
Models with experts are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError

_BIASED = {"qwen2", "qwen2_vl", "qwen2_5_vl"}
"""Families with biases of query, key and value that the configuration does not mention."""
_NORMED_HEADS = {"qwen3", "gemma3", "gemma3_text"}
"""Families with norms of queries and keys."""
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
"""Families with norms of the outputs of attention and MLP."""
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text"}
"""Families with tied embeddings, unless the configuration has `tie_word_embeddings`."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        intermediate: Width of the MLP.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        vocab: Tokens of the vocabulary.
        tied: The output head is the embedding.
        attention_bias: Parameters of the biases of one attention.
        mlp_bias: Parameters of the biases of one MLP.
        norms: Parameters of the norms of one block.
        normed_heads: Queries and keys are normalised.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    attention_bias: int = 0
    mlp_bias: int = 0
    norms: int = 0
    normed_heads: bool = False

    @property
    def q_width(self) -> int:
        """Numbers in the queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers in the keys of a token, and in its values."""
        return self.kv_heads * self.head_dim

    @property
    def block_matrices(self) -> list[int]:
        """Parameters of each matrix of a block."""
        attention = [self.hidden * width for width in (self.q_width, self.kv_width, self.kv_width, self.q_width)]
        return attention + [self.hidden * self.intermediate] * 3

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""
        return sum(self.block_matrices) + self.attention_bias + self.mlp_bias + self.norms

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self.layers * self.block_parameters + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def multiplied(self) -> int:
        """Parameters by which every token is multiplied: all except an untied embedding, which is only looked up."""
        return self.layers * self.block_parameters + self.hidden + self.embedding

    @property
    def tensors(self) -> int:
        """Approximate number of parameter tensors."""
        return self.layers * (len(self.block_matrices) + 2 + (3 if self.attention_bias else 0)) + 2

    @property
    def largest(self) -> int:
        """Parameters of the largest tensor."""
        return max(self.embedding, *self.block_matrices)

    def large(self, threshold: int) -> int:
        """Return the parameters in tensors of more than `threshold` numbers."""
        sizes = self.block_matrices * self.layers + [self.embedding] * (1 if self.tied else 2)
        return sum(size for size in sizes if size > threshold)

    def adapter(self, rank: int) -> int:
        """Return the parameters of a LoRA adapter of all matrices of the blocks."""
        widths = [(self.hidden, self.q_width), (self.hidden, self.kv_width), (self.hidden, self.kv_width)]
        widths += [(self.q_width, self.hidden)] + [(self.hidden, self.intermediate)] * 3
        return self.layers * rank * sum(a + b for a, b in widths)

    def activation_bytes(self, width: int, copies: float = 1.0) -> float:
        """Return the bytes that a block keeps for one token of a row between forward and backward.

        The block keeps, in numbers of `width` bytes except where float32 is named:

        - for each norm: its input and the normalised input in float32 (in low precision the normalised input is
          rounded), and its output;
        - queries, and keys and values as often as the token is in a sample;
        - the output of attention, and once more in a row assembled from samples;
        - the MLP's gate projection, up projection, activation of the gate, and product of activation and up projection.

        Args:
            width: Bytes of a number.
            copies: Mean number of samples that contain a token of the row.
        """
        norms = 2 * self.hidden * (4 + 2 * width)
        if self.normed_heads:
            norms += (self.q_width + self.kv_width) * (4 + width)
        attention = 3 * self.q_width + copies * 2 * self.kv_width
        return norms + width * (attention + 4 * self.intermediate)

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of the keys and values of a token, with `width` bytes for a number."""
        return 2 * self.layers * self.kv_width * width

    def forward_flops(self, tokens: float, context: float) -> float:
        """Return the operations of a forward pass over tokens that attend to `context` tokens on average."""
        return tokens * (2 * self.multiplied + 4 * self.layers * self.q_width * context)


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape of the model of a config.json.

    Args:
        config: Content of the file.
        where: Name of the file for messages.

    Raises:
        ConfigError: A size is missing, or the model has experts.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    family = str(text.get("model_type", ""))
    if experts := next((key for key in text if "experts" in key and text[key]), None):
        raise ConfigError(f"{where}: {experts}={text[experts]}: plans do not support models with experts")
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [key for key in needed if not isinstance(text.get(key), int)]:
        raise ConfigError(
            f"{where} has no whole number for {' and '.join(missing)}: a plan needs these sizes of the model"
        )
    layers, hidden, intermediate, heads, vocab = (int(text[key]) for key in needed)
    head_dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    attention_bias = q_width + 2 * kv_width if family in _BIASED or text.get("attention_bias") else 0
    if text.get("attention_bias") and family not in _BIASED:
        attention_bias += hidden  # bias of the output projection
    norms = hidden * (4 if family in _FOUR_NORMS else 2) + (2 * head_dim if family in _NORMED_HEADS else 0)
    return ModelShape(
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab,
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", family in _TIED))),
        attention_bias=attention_bias,
        mlp_bias=2 * intermediate + hidden if text.get("mlp_bias") else 0,
        norms=norms,
        normed_heads=family in _NORMED_HEADS,
    )  # fmt: skip
