"""Reasoning at the beginning of responses, between `<think>` and `</think>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THINK, END_OF_THOUGHT = "<think>", "</think>"
_TAIL = 16
"""Tokens of `<think>` and of the white space behind it, at most."""


def opens_reasoning(tokenizer: PreTrainedTokenizerBase, before: Sequence[int]) -> bool:
    """Return True if the tokens before a response end with `<think>`, which some chat templates write."""
    return _end_of(tokenizer, before).rstrip().endswith(THINK)


def without_reasoning(response: object) -> object:
    """Return the text behind the reasoning of a response; a response without reasoning is returned unchanged."""
    if not isinstance(response, str) or END_OF_THOUGHT not in response:
        return response
    return response.partition(END_OF_THOUGHT)[2].lstrip()


def without_second_think(text: str, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str:
    """Return a response without a `<think>` at its beginning, if the prompt has opened the reasoning.

    Args:
        text: text of the response.
        tokenizer: tokenizer of the prompt.
        prompt_ids: tokens of the prompt.
    """
    if not text.startswith(THINK) or not opens_reasoning(tokenizer, prompt_ids):
        return text
    rest = text.removeprefix(THINK)
    return rest.lstrip("\n") if _end_of(tokenizer, prompt_ids).endswith("\n") else rest


def _end_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids[-_TAIL:]), skip_special_tokens=False, clean_up_tokenization_spaces=False))
