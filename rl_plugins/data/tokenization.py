"""Prompts become token ids here, once: chat template, length limit, digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rl_plugins.data.on_disk import Ragged
from rl_plugins.data.parquet import PromptRows
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["filter", "error"]
Messages = Sequence[Mapping[str, Any]]
_CHUNK = 1024


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or a hub name, and check that it gives back what it was given.

    Raises:
        ConfigError: no end-of-sequence token, or text does not survive a round trip (transformers rebuilds some
            tokenizers by the model type of the folder, silently).
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {path} has no eos_token: the policy could never end a response")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    probe = "17+25=42 and so on"
    if str(tokenizer.decode(tokenizer.encode(probe, add_special_tokens=False))).strip() != probe:
        raise ConfigError(
            f"the tokenizer in {path} does not give back the text it encodes ({probe!r}): "
            "its tokenizer_config.json names a tokenizer_class that does not fit its files"
        )
    return tokenizer


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, path: str, what: str) -> None:
    """Check that the model in `path` reads the token ids of `tokenizer`.

    Raises:
        ConfigError: its tokenizer has another vocabulary.
    """
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"the {what} {path} has another vocabulary than the policy's {tokenizer.name_or_path!r}, so it cannot read "
            "the policy's tokens: use a model of the same family, or score text in workers of its own with "
            "rl_plugins.rewards.model.ModelReward"
        )


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ConfigError if the tokenizer cannot turn messages into text."""
    if not tokenizer.chat_template:
        raise ConfigError(
            f"The tokenizer {tokenizer.name_or_path!r} has no chat template, which messages need: use the "
            "tokenizer of an instruction-tuned model, or set its `chat_template`."
        )


class RoleOrders:
    """Whether a chat template takes the roles of prompts; each order of roles is tried once.

    Args:
        tokenizer: with the template.
        template_options: further variables for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, template_options
        self._reasons: dict[tuple[str, ...], str | None] = {}

    def reason_against(self, messages: Messages) -> str | None:
        """Why the template refuses these messages; None if it does not."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._reasons:
            self._reasons[roles] = self._tried(messages, roles)
        return self._reasons[roles]

    def _tried(self, messages: Messages, roles: Iterable[str]) -> str | None:
        from jinja2 import TemplateError

        conversation: list[Any] = [*messages]
        try:
            self._tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False, **self._options
            )
        except TemplateError as error:
            return (
                f"the chat template of {self._tokenizer.name_or_path!r} refuses messages of the roles "
                f"{', '.join(roles)}: {error}. Change the messages, or the template."
            )
        return None


def accepted_messages(
    rows: PromptRows, tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> Iterator[Messages]:
    """Yield the messages of each row.

    Raises:
        RowError: the chat template refuses a row's roles, or their order.
    """
    orders = RoleOrders(tokenizer, template_options)
    for number, row in enumerate(rows):
        if reason := orders.reason_against(row["prompt"]):
            raise RowError(rows.where(number), "column 'prompt'", reason)
        yield row["prompt"]


def tokenize_prompts(
    prompts: Iterable[Messages], tokenizer: PreTrainedTokenizerBase, template_options: Mapping[str, Any]
) -> Ragged:
    """Return the token ids of each prompt's messages, up to and including the start of the assistant's turn."""

    def tokenized(messages: list[Any]) -> Any:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False, **template_options
        )

    return _in_chunks(prompts, tokenized)


def tokenize_responses(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Ragged:
    """Return the token ids of responses, each with the end of sequence."""

    def tokenized(chunk: list[str]) -> list[list[int]]:
        encoded = tokenizer(chunk, add_special_tokens=False)["input_ids"]
        return [[*ids, tokenizer.eos_token_id] for ids in encoded]

    return _in_chunks(texts, tokenized)


def _in_chunks(items: Iterable[Any], tokenized: Callable[[list[Any]], Iterable[list[int]]]) -> Ragged:
    remaining = iter(items)
    chunks = iter(lambda: list(islice(remaining, _CHUNK)), [])
    return Ragged(ids for chunk in chunks for ids in tokenized(chunk))


def within_limit(rows: PromptRows, lengths: np.ndarray, *, option: str, limit: int, overlong: Overlong) -> np.ndarray:
    """Return the numbers of the rows of at most `limit` tokens.

    Raises:
        ConfigError: a row is longer and `overlong` is "error", or every row is longer; names `option`.
    """
    kept = np.flatnonzero(lengths <= limit)
    if len(kept) < len(lengths) and overlong == "error":
        worst = int(np.argmax(lengths))
        raise ConfigError(
            f"{rows.where(worst)}: {lengths[worst]} tokens, more than {option}={limit} "
            f"({len(lengths) - len(kept)} such rows). Raise {option}, or set overlong_prompts=filter."
        )
    if not len(kept):
        raise ConfigError(f"Every row has more tokens than {option}={limit} (the shortest {min(lengths)}): raise it.")
    return kept


def digest(sequences: Iterable[Sequence[int] | np.ndarray]) -> str:
    """Return a short digest of token sequences and their order."""
    hasher = hashlib.blake2b(digest_size=8)
    for ids in sequences:
        hasher.update(len(ids).to_bytes(8, "little") + np.asarray(ids, dtype=np.int64).tobytes())
    return hasher.hexdigest()
