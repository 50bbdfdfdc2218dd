"""Supervised fine-tuning data: the messages of a prompt, and a response under a dotted key of the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Unpack

from rl_plugins.config.settings import AT_LEAST_1, check_ranges
from rl_plugins.data.datamodule import StepDataModule, StepOptions
from rl_plugins.data.formats import find_text
from rl_plugins.data.orders import Source
from rl_plugins.data.parquet import COLUMNS, UNSCORED_COLUMNS, Paths, PromptRows, RowSource
from rl_plugins.data.prompts import TokenizedColumns, TokenizedPrompts
from rl_plugins.data.tokenization import check_end_of_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SFTBatch = dict[str, list[Any]]


class SFTDataModule(StepDataModule[SFTBatch]):
    """Data module of responses: `{"prompt_ids": ..., "response_ids": ...}`, lists of token ids, for every step.

    A response ends with the end-of-sequence token. If rows have images, there is also `image_inputs`, the inputs of
    the images of each prompt.

    Args:
        train: rows for training.
        validation: rows for validation; their prompts are served without responses, as `PromptBatch`.
        response_key: dotted key of a row's response, such as `reward_model.ground_truth` or `extra_info.answer`.
        max_response_tokens: longest response, in tokens, end of sequence included.
        options: options of `StepDataModule`: `tokenizer`, `prompts_per_step`, `max_prompt_tokens`, `eval_batch_size`,
            `overlong_prompts`, `bad_images`, `seed`, `chat_template_kwargs`.
    """

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        response_key: str = "reward_model.ground_truth",
        max_response_tokens: int = 1024,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(train, validation, **options)
        self.response_key = response_key
        check_ranges(int, AT_LEAST_1, max_response_tokens=max_response_tokens)
        self.max_response_tokens = max_response_tokens

    def columns(self, split: str) -> Sequence[str]:
        """Return the columns every row must have; only validation rows need a reward."""
        return COLUMNS if split == "validation" else UNSCORED_COLUMNS

    def build(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str
    ) -> TokenizedColumns[SFTBatch] | TokenizedPrompts:
        """Tokenise prompts and responses and apply the limits; validation rows become prompts.

        Raises:
            ConfigError: a row has no text under `response_key`, or the tokenizer has no end-of-sequence token.
        """
        check_end_of_sequence(tokenizer)
        prompts = self.build_prompts(rows, tokenizer)
        if split == "validation":
            return prompts
        texts = (
            find_text(row, self.response_key, "response_key", rows.location(number)) for number, row in enumerate(rows)
        )
        response_ids = self.tokenize_responses(rows, texts, tokenizer, prompts)
        kept = self.rows_within_limits(prompts, response_ids.lengths, self.max_response_tokens)
        columns = {"prompt_ids": prompts.prompt_ids, "response_ids": response_ids}
        return TokenizedColumns(columns, kept, lambda rows, **values: values, images=prompts.images)
