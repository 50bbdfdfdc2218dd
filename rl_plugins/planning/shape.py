"""What memory and time depend on of a model, from its config.json alone.

A decoder as transformers builds it: blocks of attention and a gated MLP, rotary positions, RMS norms. Experts are not
understood, and refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError

_BIASED = {"qwen2", "qwen2_vl", "qwen2_5_vl"}
"""Families whose query, key and value have a bias that their configuration does not mention."""
_NORMED_HEADS = {"qwen3", "gemma3", "gemma3_text"}
"""Families that normalise queries and keys."""
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
"""Families whose blocks normalise what attention and MLP give, too."""
_TIED = {"gemma", "gemma2", "gemma3", "gemma3_text"}
"""Families whose embeddings are tied unless their configuration says otherwise."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        layers: blocks.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: width of a head.
        vocab: tokens.
        tied: the output head is the embedding.
        attention_bias: numbers of biases in a block's attention.
        mlp_bias: the same, of its MLP.
        norms: numbers of a block's norms.
        normed_heads: queries and keys are normalised.
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
        """Numbers of a token's queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys; as many are its values."""
        return self.kv_heads * self.head_dim

    @property
    def block_matrices(self) -> list[int]:
        """Sizes of a block's matrices."""
        attention = [self.hidden * width for width in (self.q_width, self.kv_width, self.kv_width, self.q_width)]
        return attention + [self.hidden * self.intermediate] * 3

    @property
    def block_parameters(self) -> int:
        """Parameters of a block."""
        return sum(self.block_matrices) + self.attention_bias + self.mlp_bias + self.norms

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; those of the output head are as many."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.layers * self.block_parameters + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def multiplied(self) -> int:
        """Parameters that every token is multiplied by: all but an embedding that is only looked up."""
        return self.layers * self.block_parameters + self.hidden + self.embedding

    @property
    def tensors(self) -> int:
        """About how many parameters there are, counting each tensor once."""
        return self.layers * (len(self.block_matrices) + 2 + (3 if self.attention_bias else 0)) + 2

    def large(self, threshold: int) -> int:
        """Parameters in tensors of more than `threshold` numbers."""
        sizes = self.block_matrices * self.layers + [self.embedding] * (1 if self.tied else 2)
        return sum(size for size in sizes if size > threshold)

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA adapter of every matrix of the blocks."""
        widths = [(self.hidden, self.q_width), (self.hidden, self.kv_width), (self.hidden, self.kv_width)]
        widths += [(self.q_width, self.hidden)] + [(self.hidden, self.intermediate)] * 3
        return self.layers * rank * sum(a + b for a, b in widths)

    def activation_bytes(self, width: int, copies: float = 1.0) -> float:
        """What a block keeps of a token of a row between forward and backward, in numbers of `width` bytes.

        Of each norm its input and the normalised input in float32 (in low precision: the latter rounded) and what it
        gives; queries; keys and values, of each token as often as it is in a sample (`copies`); what attention gives,
        once more as a row is put together from samples; and the MLP's two inner products, the gate's activation and
        their product.
        """
        norms = 2 * self.hidden * (4 + 2 * width)
        if self.normed_heads:
            norms += (self.q_width + self.kv_width) * (4 + width)
        attention = 3 * self.q_width + copies * 2 * self.kv_width
        return norms + width * (attention + 4 * self.intermediate)

    def kv_bytes(self, width: int) -> int:
        """Bytes of a token's keys and values, of `width` bytes a number."""
        return 2 * self.layers * self.kv_width * width

    def forward_flops(self, tokens: float, context: float) -> float:
        """Operations of a forward pass over tokens that each attend to `context` others on average."""
        return tokens * (2 * self.multiplied + 4 * self.layers * self.q_width * context)


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape that a config.json describes.

    Args:
        config: its content.
        where: names it, for messages.

    Raises:
        ConfigError: a size is missing, or the model has experts.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    family = str(text.get("model_type", ""))
    if experts := next((key for key in text if "experts" in key and text[key]), None):
        raise ConfigError(f"{where}: {experts}={text[experts]}: models with experts are not planned for")
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [key for key in needed if not isinstance(text.get(key), int)]:
        raise ConfigError(
            f"{where} says no {' and no '.join(missing)}: it needs them as whole numbers to be planned for"
        )
    layers, hidden, intermediate, heads, vocab = (int(text[key]) for key in needed)
    head_dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    attention_bias = q_width + 2 * kv_width if family in _BIASED or text.get("attention_bias") else 0
    if text.get("attention_bias") and family not in _BIASED:
        attention_bias += hidden  # the output projection's, too
    norms = hidden * (4 if family in _FOUR_NORMS else 2) + (2 * head_dim if family in _NORMED_HEADS else 0)
    return ModelShape(
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab,
        tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", family in _TIED))),
        attention_bias=attention_bias,
        mlp_bias=2 * intermediate + hidden if text.get("mlp_bias") else 0,
        norms=norms,
        normed_heads=family in _NORMED_HEADS,
    )  # fmt: skip
