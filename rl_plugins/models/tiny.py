"""Tiny policy, small enough to train and sample on a CPU, made from a few numbers and a seed without a download.

The model is an ordinary Qwen2 causal language model with tied embeddings. Any software for Qwen2 can run the model. The
tokenizer is an ordinary byte-level BPE tokenizer of Qwen2, with the 256 bytes as alphabet and no merges. Any text can
be encoded (in Unicode's composed form, as for Qwen2), and every ASCII character is one token. The class must be the
tokenizer class of Qwen2, because `AutoTokenizer` rebuilds the tokenizer of a qwen2 folder with this class. The rebuilt
tokenizer equals the saved tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rl_plugins.errors import ConfigError

PAD_TOKEN = "<|pad|>"
END_TOKEN = "<|end|>"
ROLE_TOKENS = ("<|user|>", "<|assistant|>", "<|system|>")
TOOL_ROLE_TOKEN = "<|tool|>"
CALL_TOKENS = ("<tool_call>", "</tool_call>")

# `generation` marks the text of the assistant, for `return_assistant_tokens_mask=True`.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TOOL_CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}"
    "{{ tool['function']['name'] + '(' + tool['function']['parameters']['properties'] | join(',') + ')' }}"
    "{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(*, tools: bool = False) -> Qwen2Tokenizer:
    """Return the byte-level tokenizer: 256 bytes, then `<|pad|>`, `<|end|>` (end of sequence) and the roles.

    The chat template is compact: a question is `<|user|>17+25<|assistant|>`, an answer is `42<|end|>`.

    Args:
        tools: chat template and tokens for tools. Tools are shown as `<|system|>add(a,b)`, a call has the form of
            Hermes (`<tool_call>{"name": "add", "arguments": {...}}</tool_call>`), and a result is `<|tool|>42`.
    """
    roles = (*ROLE_TOKENS, TOOL_ROLE_TOKEN) if tools else ROLE_TOKENS
    pieces = [*sorted(ByteLevel.alphabet()), PAD_TOKEN, END_TOKEN, *roles]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # no byte is unknown; null in Qwen2's own files, too
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        extra_special_tokens=list(roles),
        chat_template=TOOL_CHAT_TEMPLATE if tools else CHAT_TEMPLATE,
    )
    if tools:
        # As in Qwen's own tokenizers, these tokens are not special: texts of data may have them.
        tokenizer.add_tokens(list(CALL_TOKENS))
    return tokenizer


def build_model(
    *,
    hidden_size: int = 128,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 384,
    max_position_embeddings: int = 256,
    seed: int = 0,
    initializer_range: float = 0.08,
    tools: bool = False,
) -> Qwen2ForCausalLM:
    """Return a new float32 model for the vocabulary of `build_tokenizer` (0.43 M parameters by default).

    The same arguments always give the same weights. The random state of the caller does not change.

    Args:
        hidden_size: width of the model, a multiple of twice `num_heads`. vLLM on CPU needs heads of width 32 or more.
        num_layers: number of decoder layers.
        num_heads: number of query heads, a multiple of `num_kv_heads`.
        num_kv_heads: number of key and value heads.
        intermediate_size: inner width of the gated MLP.
        max_position_embeddings: largest number of tokens of prompt and response together.
        seed: seed of the initial weights.
        initializer_range: standard deviation of the initial weights. At this size, a value of about
            1 / sqrt(hidden_size) learns much sooner than the 0.02 of Qwen2.
        tools: vocabulary with the tokens for tools.

    Raises:
        ConfigError: a size is not positive, or the heads do not divide the width.
    """
    sizes = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"tiny model: {name} is {size}; set it to 1 or more")
    if hidden_size % (2 * num_heads):
        raise ConfigError(
            f"tiny model: hidden_size {hidden_size} is not a multiple of twice num_heads {num_heads}: "
            "rotary positions need heads of an even width, so change hidden_size or num_heads"
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"tiny model: num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}: change one of the two"
        )
    tokenizer = build_tokenizer(tools=tools)
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        dtype="float32",
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, **special)
    return model


def save_tiny_policy(folder: str | Path, **model_arguments: Any) -> Path:
    """Write the files of a tiny policy for `from_pretrained`: weights (safetensors), configurations and tokenizer.

    Args:
        folder: folder to write. Files with the same names are replaced.
        model_arguments: arguments of `build_model`.

    Returns:
        The folder.

    Raises:
        ConfigError: `folder` is a file, or `build_model` refuses a size.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"tiny policy: {path} is a file; name a folder to write to")
    model = build_model(**model_arguments)
    tokenizer = build_tokenizer(tools=model_arguments.get("tools", False))
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
