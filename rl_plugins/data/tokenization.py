"""Prompts become token ids here, once: chat template, length limit, digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rl_plugins.data.parquet import PromptRows
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["filter", "error"]


def load_tokenizer(tokenizer: str | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return the tokenizer, loaded when it is named by a folder or a hub name.

    Raises:
        ConfigError: it has no chat template.
    """
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    if not tokenizer.chat_template:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, which messages need: use the "
            "tokenizer of an instruction-tuned model, or set its `chat_template`."
        )
    return tokenizer


def tokenize_prompts(
    rows: PromptRows, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> list[list[int]]:
    """Return the token ids of each row's messages, up to and including the start of the assistant's turn."""
    messages = [row["prompt"] for row in rows.rows]
    ids: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template_options
    )
    return ids


def within_limit(rows: PromptRows, lengths: Sequence[int], *, option: str, limit: int, overlong: Overlong) -> list[int]:
    """Return the numbers of the rows of at most `limit` tokens.

    Raises:
        ConfigError: a row is longer and `overlong` is "error", or every row is longer; names `option`.
    """
    kept = [number for number, length in enumerate(lengths) if length <= limit]
    if len(kept) < len(lengths) and overlong == "error":
        worst = max(range(len(lengths)), key=lengths.__getitem__)
        raise ConfigError(
            f"{rows.where(worst)}: {lengths[worst]} tokens, more than {option}={limit} "
            f"({len(lengths) - len(kept)} such rows). Raise {option}, or set overlong_prompts=filter."
        )
    if not kept:
        raise ConfigError(f"Every row has more tokens than {option}={limit} (the shortest {min(lengths)}): raise it.")
    return kept


def digest(sequences: Sequence[Sequence[int]]) -> str:
    """Return a short digest of token sequences and their order."""
    hasher = hashlib.blake2b(digest_size=8)
    for ids in sequences:
        hasher.update(len(ids).to_bytes(8, "little") + np.asarray(ids, dtype=np.int64).tobytes())
    return hasher.hexdigest()
