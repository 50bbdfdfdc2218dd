"""Supervised fine-tuning data: a response to each prompt, or whole conversations with many replies of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from rl_plugins.config.settings import AT_LEAST_1, check_ranges
from rl_plugins.data.conversation_tokens import (
    ConversationTokenizer,
    last_learned,
    lengths_of,
    packed_samples,
    unpacked_samples,
)
from rl_plugins.data.conversations import conversation_row
from rl_plugins.data.datamodule import StepDataModule, StepOptions
from rl_plugins.data.formats import find_text
from rl_plugins.data.on_disk import MappedLists
from rl_plugins.data.orders import Source
from rl_plugins.data.parquet import COLUMNS, UNSCORED_COLUMNS, Paths, PromptRows, RowForm, RowSource
from rl_plugins.data.prompts import TokenizedColumns, TokenizedPrompts
from rl_plugins.data.tokenization import ending_tokens, within_limit
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SFTBatch = dict[str, list[Any]]
_CHUNK = 64


class SFTDataModule(StepDataModule[SFTBatch]):
    """Data module of responses: `{"prompt_ids": ..., "response_ids": ...}`, lists of token ids, for every step.

    A response ends with the token behind a response in the chat template, or with the end-of-sequence token (see
    `ResponseEnd`). If rows have images, there is also `image_inputs`, the inputs of
    the images of each prompt.

    With `messages_key`, a row is a whole conversation. The response is everything from the first reply of the policy
    on, and `response_masks` is 1 on the tokens of replies. All token ids are the ids of the chat template.

    Args:
        train: rows for training.
        validation: rows for validation.
        response_key: dotted key of a row's response, such as `reward_model.ground_truth` or `extra_info.answer`.
        messages_key: dotted key of a row's conversation, such as `messages`; None for rows with one response each.
        tools_key: dotted key of the JSON schemas of the tools of a conversation. Rows may lack the key.
        split_conversations: True to make a sample of its own of each reply that the chat template writes otherwise once
            messages follow, for example without its reasoning. False refuses such rows.
        validate_on: `prompts` serves the prompts of validation rows as `PromptBatch`; `responses` serves validation
            rows as training rows, for `val/loss`.
        max_response_tokens: longest response, in tokens, end of sequence included; of a conversation, all tokens from
            the first reply on.
        options: further options of `StepDataModule`.

    Attributes:
        further_ends: ends of learned turns at which sampling from the model goes on. `SFT.export` names them.
    """

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        response_key: str = "reward_model.ground_truth",
        messages_key: str | None = None,
        tools_key: str = "tools",
        split_conversations: bool = False,
        validate_on: Literal["prompts", "responses"] = "prompts",
        max_response_tokens: int = 1024,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(train, validation, **options)
        if validate_on not in ("prompts", "responses"):
            raise ConfigError(f"validate_on={validate_on!r}: choose 'prompts' or 'responses'")
        self.response_key, self.messages_key, self.tools_key = response_key, messages_key, tools_key
        self.split_conversations, self.validate_on = split_conversations, validate_on
        check_ranges(int, AT_LEAST_1, max_response_tokens=max_response_tokens)
        self.max_response_tokens = max_response_tokens
        self.further_ends = set[int]()

    def _has_prompts(self, split: str) -> bool:
        return split == "validation" and self.validate_on == "prompts"

    @override
    def columns(self, split: str) -> Sequence[str]:
        """Return the columns every row must have; rows need a reward only if validation generates responses."""
        if self._has_prompts(split):
            return COLUMNS
        return UNSCORED_COLUMNS if self.messages_key is None else ()

    @override
    def row_form(self, split: str) -> RowForm | None:
        messages_key, tools_key = self.messages_key, self.tools_key
        if messages_key is None or self._has_prompts(split):
            return None
        return lambda row, location: conversation_row(row, messages_key, tools_key, location)

    def build(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str
    ) -> TokenizedColumns[SFTBatch] | TokenizedPrompts:
        """Tokenise prompts and responses and apply the limits.

        Raises:
            ConfigError: a row has no text under `response_key`, or the chat template refuses a conversation.
        """
        if self.messages_key is not None and not self._has_prompts(split):
            return self._build_conversations(rows, tokenizer)
        prompts = self.build_prompts(rows, tokenizer)
        if self._has_prompts(split):
            return prompts
        texts = (
            find_text(row, self.response_key, "response_key", rows.location(number)) for number, row in enumerate(rows)
        )
        response_ids = self.tokenize_responses(rows, texts, tokenizer, prompts)
        kept = self.within_limits(rows, prompts.kept, response_ids.lengths, self.max_response_tokens)
        columns = {"prompt_ids": prompts.prompt_ids, "response_ids": response_ids}
        return TokenizedColumns(columns, kept, lambda rows, **values: values, images=prompts.images)

    def _build_conversations(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase) -> TokenizedColumns[SFTBatch]:
        assert self.tokenizer is not None and not isinstance(self.tokenizer, str)
        encoder = ConversationTokenizer(self.tokenizer, self.chat_template_kwargs, split=self.split_conversations)
        lengths: list[tuple[int, int]] = []
        ends = set[int]()

        def packed() -> Iterator[list[int]]:
            for chunk in rows.chunks(_CHUNK):
                located = [(row, rows.location(len(lengths) + number)) for number, row in enumerate(chunk)]
                for (_, location), samples in zip(located, encoder.encode(located), strict=True):
                    if self.images is not None:
                        self.images.check_response(location, samples[0].ids)
                    lengths.append(lengths_of(samples))
                    ends.add(last_learned(samples[0]))
                    yield packed_samples(samples)

        conversations = MappedLists(packed())
        self.further_ends |= ends - ending_tokens(tokenizer)
        _announce_ends(self.further_ends, tokenizer)
        prompts, responses = np.asarray(lengths, dtype=np.int64).T
        kept = within_limit(
            rows,
            prompts,
            option="max_prompt_tokens",
            limit=self.max_prompt_tokens,
            overlong=self.overlong_prompts,
        )
        kept = self.within_limits(rows, kept, responses, self.max_response_tokens)
        return TokenizedColumns({"conversations": conversations}, kept, _conversation_batch)


def _announce_ends(ends: set[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print ends of learned turns at which sampling from the model goes on."""
    for end in sorted(ends):
        rank_zero_info(
            f"the policy learns to end a turn with {tokenizer.convert_ids_to_tokens(end)!r} ({end}), and sampling ends "
            f"at {tokenizer.eos_token!r}: set stop_token_ids=[{end}] of the sampling settings for a validation by "
            f"rewards (in a recipe: sampling.stop_token_ids=[{end}]). The policy that the run exports names the end"
        )


def _conversation_batch(rows: Sequence[int], conversations: Sequence[Sequence[int]]) -> SFTBatch:
    """Return the samples of conversations as one batch."""
    samples = [sample for packed in conversations for sample in unpacked_samples(packed)]
    return {
        "prompt_ids": [prompt for prompt, _, _ in samples],
        "response_ids": [response for _, response, _ in samples],
        "response_masks": [mask for _, _, mask in samples],
    }
