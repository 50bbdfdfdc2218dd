"""Sizes of a model from its config.json, as far as memory and time depend on them.

The model is a decoder as transformers builds it: blocks of attention and an MLP or experts, rotary positions, RMS
norms. A vision-language model has a vision tower and a projector before the decoder. Biases that only some families
have, such as those of norms, are left out: less than 1 % of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.model_json import chosen_experts, expert_count
from rl_plugins.planning.tower import Tower, tower_of

_BIASED = {"qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_moe"}
"""Families with biases of query, key and value that the configuration does not mention."""
_NORMED_HEADS = {"qwen3", "gemma3", "gemma3_text", "qwen3_moe", "qwen3_vl_text", "apertus"}
"""Families with norms of queries and keys, head by head."""
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text"}
"""Families with norms of the outputs of attention and MLP."""
_SPARSE = {
    "mixtral": "intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
    "olmoe": "intermediate_size",
    "glm4_moe": "moe_intermediate_size",
    "gpt_oss": "intermediate_size",
}
"""Families with experts: the key of the width of an expert."""
_TIED = {"cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3", "gemma3_text", "smollm3", "starcoder2"}
"""Families with tied embeddings, unless the configuration has `tie_word_embeddings`."""
_NOT_WRITTEN = {
    "gemma3_text": {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    },
    "llama": {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}  # fmt: skip
"""Default sizes of text models, which published vision-language models leave out of their config.json."""
_UNGATED = {"apertus", "arcee", "gpt_neox", "nemotron", "phi", "starcoder2"}
"""Families whose MLP has an up projection and a down projection alone."""


@dataclass(frozen=True)
class Experts:
    """Sizes of the experts of a block.

    Attributes:
        number: experts of a block.
        chosen: experts of a token.
        intermediate: width of an expert.
        shared: width of the shared experts together; 0 without shared experts.
        is_gated: the shared experts have a gate.
        biased: experts and router have biases.
        dense_blocks: blocks with an MLP in place of experts.
    """

    number: int
    chosen: int
    intermediate: int
    shared: int = 0
    is_gated: bool = False
    biased: bool = False
    dense_blocks: int = 0

    def matrices(self, hidden: int) -> list[int]:
        """Return the parameters of each matrix: all experts together, the router, the shared experts."""
        experts = [self.number * hidden * 2 * self.intermediate, self.number * hidden * self.intermediate]
        shared = [hidden * self.shared] * 3 if self.shared else []
        return [*experts, hidden * self.number, *shared, *([hidden] if self.is_gated else [])]

    def biases(self, hidden: int) -> int:
        """Return the parameters of the biases."""
        return self.number * (2 * self.intermediate + hidden + 1) if self.biased else 0

    def unused(self, hidden: int, tokens: float) -> float:
        """Return the parameters of the experts that are expected not to be chosen by any of `tokens` tokens."""
        return self.number * (1 - self.chosen / self.number) ** tokens * 3 * hidden * self.intermediate


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads: query heads.
        kv_heads: heads of keys and values.
        head_dim: width of a head.
        vocab: tokens of the vocabulary.
        tied: the output head is the embedding.
        attention_bias: parameters of the biases of one attention.
        mlp_bias: parameters of the biases of one MLP.
        norms: parameters of the norms of one block.
        normed_heads: queries and keys are normalised.
        gated: the MLP has a gate projection, as experts have.
        experts: experts of the blocks; None for a dense model.
        tower: vision tower and projector; None for a model of text. Activations of images are not planned.
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
    gated: bool = True
    experts: Experts | None = None
    tower: Tower | None = None

    @property
    def q_width(self) -> int:
        """Numbers in the queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers in the keys of a token, and in its values."""
        return self.kv_heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        """Largest width of the MLP of a token: of a dense MLP, or of the chosen and shared experts together."""
        experts = self.experts
        sparse = 0 if experts is None else experts.chosen * experts.intermediate + experts.shared
        return max(self.intermediate if self._dense_blocks else 0, sparse)

    @property
    def _dense_blocks(self) -> int:
        return self.layers if self.experts is None else self.experts.dense_blocks

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def _attention_matrices(self) -> list[int]:
        return [self.hidden * width for width in (self.q_width, self.kv_width, self.kv_width, self.q_width)]

    @property
    def _blocks(self) -> list[tuple[int, list[int], int]]:
        """Number of blocks, parameters of each matrix of a block, and of its biases, for each kind of blocks."""
        dense = self._attention_matrices + [self.hidden * self.intermediate] * self._mlp_matrices
        kinds = [(self._dense_blocks, dense, self.attention_bias + self.mlp_bias)]
        if self.experts is not None:
            sparse = self._attention_matrices + self.experts.matrices(self.hidden)
            biases = self.attention_bias + self.experts.biases(self.hidden)
            kinds.append((self.layers - self._dense_blocks, sparse, biases))
        return [kind for kind in kinds if kind[0]]

    @property
    def block_parameters(self) -> int:
        """Parameters of the largest block."""
        return max(sum(matrices) + biases + self.norms for _, matrices, biases in self._blocks)

    @property
    def experts_of_block(self) -> int:
        """Parameters in the matrices of all experts of a block."""
        return 0 if self.experts is None else 3 * self.experts.number * self.hidden * self.experts.intermediate

    @property
    def sparse_blocks(self) -> int:
        """Blocks with experts."""
        return self.layers - self._dense_blocks

    def experts_elsewhere(self, ranks: int) -> float:
        """Return the parameters of a block's experts on other ranks, if `ranks` ranks share the experts of a block."""
        return self.experts_of_block * (1 - 1 / ranks)

    @property
    def _all_blocks(self) -> int:
        return sum(number * (sum(matrices) + biases + self.norms) for number, matrices, biases in self._blocks)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return self._all_blocks + self.hidden + self.embedding * (1 if self.tied else 2) + sum(self._tower_matrices)

    @property
    def _tower_matrices(self) -> list[int]:
        return [] if self.tower is None else self.tower.matrices

    @property
    def multiplied(self) -> int:
        """Parameters in products: all except an untied embedding, which is only looked up."""
        return self._all_blocks + self.hidden + self.embedding

    @property
    def tensors(self) -> int:
        """Approximate number of parameter tensors."""
        matrices = sum(number * len(matrices) for number, matrices, _ in self._blocks)
        return matrices + self.layers * (2 + (3 if self.attention_bias else 0)) + 2 + len(self._tower_matrices)

    @property
    def largest(self) -> int:
        """Parameters of the largest tensor."""
        in_blocks = (size for _, matrices, _ in self._blocks for size in matrices)
        return max(self.embedding, *in_blocks, *self._tower_matrices)

    def large(self, threshold: int) -> int:
        """Return the parameters in tensors of more than `threshold` numbers."""
        blocks = sum(size * number for number, matrices, _ in self._blocks for size in matrices if size > threshold)
        blocks += sum(size for size in self._tower_matrices if size > threshold)
        return blocks + (self.embedding * (1 if self.tied else 2) if self.embedding > threshold else 0)

    def multiplied_by(self, tokens: float) -> float:
        """Return the parameters in products of `tokens` tokens, without the experts that no token chooses."""
        if self.experts is None:
            return self.multiplied
        return self.multiplied - self.sparse_blocks * self.experts.unused(self.hidden, tokens)

    def adapter(self, rank: int, *, with_tower: bool = True, with_experts: bool = False) -> int:
        """Return the parameters of a LoRA adapter of all matrices of the blocks.

        Args:
            rank: rank of the adapter.
            with_tower: the matrices of the vision tower have an adapter, too.
            with_experts: the matrices of each expert have an adapter, too.
        """
        of_tower = self.tower.adapter(rank) if self.tower is not None and with_tower else 0
        of_experts = 0
        if self.experts is not None and with_experts:
            widths_of_expert = 2 * self.hidden + 3 * self.experts.intermediate
            of_experts = self.sparse_blocks * self.experts.number * rank * widths_of_expert
        return self.layers * rank * sum(a + b for a, b in self.adapted_layers) + of_experts + of_tower

    @property
    def adapted_layers(self) -> list[tuple[int, int]]:
        """Input and output width of each layer of a block with an adapter, without experts."""
        widths = [(self.hidden, self.q_width), (self.hidden, self.kv_width), (self.hidden, self.kv_width)]
        widths.append((self.q_width, self.hidden))
        if self.experts is None:
            widths += [(self.hidden, self.intermediate)] * self._mlp_matrices
        elif self.experts.is_gated:
            widths.append((self.hidden, 1))
        return widths

    def activation_bytes(self, width: int, copies: float = 1.0) -> float:
        """Return the bytes that a block keeps for one token of a row between forward and backward.

        The block keeps, in numbers of `width` bytes except where float32 is named:

        - for each norm: its input and the normalised input in float32 (in low precision the normalised input is
          rounded), and its output;
        - queries, and keys and values as often as the token is in a sample;
        - the output of attention, and once more in a row assembled from samples;
        - the MLP's gate projection, up projection, activation of the gate, and product of activation and up projection;
          without a gate, the up projection and its activation;
        - with experts: the input and the output of each chosen expert, and the numbers of the router in float32.

        Args:
            width: bytes of a number.
            copies: mean number of samples that contain a token of the row.
        """
        norms = 2 * self.hidden * (4 + 2 * width)
        if self.normed_heads:
            norms += (self.q_width + self.kv_width) * (4 + width)
        attention = 3 * self.q_width + copies * 2 * self.kv_width
        dense = width * (4 if self.gated else 2) * self.intermediate
        if self.experts is None:
            return norms + width * attention + dense
        chosen, experts = self.experts.chosen, self.experts
        sparse = width * (4 * (chosen * experts.intermediate + experts.shared) + 2 * chosen * self.hidden)
        sparse += 2 * 4 * experts.number
        share = self._dense_blocks / self.layers
        return norms + width * attention + share * dense + (1 - share) * sparse

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of the keys and values of a token, with `width` bytes for a number."""
        return 2 * self.layers * self.kv_width * width

    def forward_flops(self, tokens: float, context: float) -> float:
        """Return the operations of a forward pass over tokens that attend to `context` tokens on average."""
        return tokens * (2 * self.multiplied_by(1) + 4 * self.layers * self.q_width * context)


def shape_of(config: Mapping[str, Any], where: str) -> ModelShape:
    """Return the shape of the model of a config.json.

    Args:
        config: content of the file.
        where: name of the file for messages.

    Raises:
        ConfigError: a size is missing, or plans do not know the experts of the family.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    family = str(text.get("model_type", ""))
    if text is not config:
        text = {**_NOT_WRITTEN.get(family, {}), **text}
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if missing := [key for key in needed if not isinstance(text.get(key), int)]:
        raise ConfigError(
            f"{where} has no whole number for {' and '.join(missing)}: a plan needs these sizes of the model"
        )
    layers, hidden, intermediate, heads, vocab = (int(text[key]) for key in needed)
    experts = _experts(text, family, where)
    head_dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    q_width, kv_width = heads * head_dim, kv_heads * head_dim
    attention_bias = q_width + 2 * kv_width if family in _BIASED or text.get("attention_bias") else 0
    if text.get("attention_bias") and family not in _BIASED:
        attention_bias += hidden  # bias of the output projection
    if family == "gpt_oss":
        # Each head has a sink.
        attention_bias += heads
    has_normed_heads = family in _NORMED_HEADS or bool(text.get("use_qk_norm"))
    norms = hidden * (4 if family in _FOUR_NORMS else 2) + (2 * head_dim if has_normed_heads else 0)
    if family == "olmoe":
        norms += q_width + kv_width
    return ModelShape(
        layers, hidden, intermediate, heads, kv_heads, head_dim, vocab,
        # The configuration of a vision-language model decides, not the configuration of its decoder.
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", family in _TIED))),
        attention_bias=attention_bias,
        mlp_bias=(1 if family in _UNGATED else 2) * intermediate + hidden if text.get("mlp_bias") else 0,
        norms=norms,
        normed_heads=has_normed_heads,
        gated=family not in _UNGATED,
        experts=experts,
        tower=tower_of(config, hidden, where),
    )  # fmt: skip


def _experts(text: Mapping[str, Any], family: str, where: str) -> Experts | None:
    found = next((key for key in text if "experts" in key and text[key]), None)
    if found is None:
        return None
    if family not in _SPARSE:
        raise ConfigError(
            f"{where}: {found}={text[found]}: plans know the experts of {', '.join(sorted(_SPARSE))}, not of {family}"
        )
    number, chosen, width = expert_count(text), chosen_experts(text), _SPARSE[family]
    sizes = {width: isinstance(text.get(width), int), "num_experts_per_tok": chosen, "num_experts": number}
    if missing := [key for key, size in sizes.items() if not size]:
        raise ConfigError(
            f"{where} has no whole number for {' and '.join(missing)}: a plan needs these sizes of the experts"
        )
    shared = int(text.get("n_shared_experts") or 0) * int(text[width]) or int(
        text.get("shared_expert_intermediate_size") or 0
    )
    layers, step = int(text["num_hidden_layers"]), int(text.get("decoder_sparse_step") or 1)
    first, without = int(text.get("first_k_dense_replace") or 0), set(text.get("mlp_only_layers") or ())
    sparse = [layer for layer in range(first, layers) if (layer + 1) % step == 0 and layer not in without]
    return Experts(
        number=number,
        chosen=chosen,
        intermediate=int(text[width]),
        shared=shared,
        is_gated=family == "qwen2_moe",
        biased=family == "gpt_oss",
        dense_blocks=layers - len(sparse),
    )
