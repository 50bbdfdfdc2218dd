"""Preference data: a better and a worse response to each prompt, or single responses labelled good or bad.

A row holds the texts under dotted keys, beside the columns of every prompt file. A tokenised response ends with the
end-of-sequence token, as a response of the policy must.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Unpack

import numpy as np

from rl_plugins.config.settings import AT_LEAST_1, check_ranges
from rl_plugins.data.datamodule import StepDataModule, StepOptions
from rl_plugins.data.experience import Experience
from rl_plugins.data.formats import Pair, read_judged, read_pair
from rl_plugins.data.images import ImageInputs
from rl_plugins.data.labelled import LabelledBatch
from rl_plugins.data.orders import Source
from rl_plugins.data.parquet import COLUMNS, UNSCORED_COLUMNS, Paths, PromptRows, RowSource
from rl_plugins.data.prompts import RowBatch, TokenizedColumns, TokenizedPrompts
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ValidateOn = Literal["prompts", "responses"]


class PairBatch(RowBatch):
    """The pairs of one step on one rank; read only.

    Attributes:
        prompt_ids: token ids of each prompt.
        chosen_ids: token ids of each better response.
        rejected_ids: token ids of each worse response.
        margins: difference in quality of each pair; 0 if the data has no margins.
        rows: number of each pair's row in the concatenated data set.
        image_inputs: inputs of the images of each prompt; None if no row has images.
    """

    __slots__ = ("chosen_ids", "image_inputs", "margins", "prompt_ids", "rejected_ids", "rows")

    def __init__(
        self,
        prompt_ids: list[list[int]],
        chosen_ids: list[list[int]],
        rejected_ids: list[list[int]],
        margins: list[float],
        rows: list[int],
        image_inputs: list[ImageInputs | None] | None = None,
    ) -> None:
        """Set the fields."""
        self.image_inputs = image_inputs
        self.prompt_ids = prompt_ids
        self.chosen_ids = chosen_ids
        self.rejected_ids = rejected_ids
        self.margins = margins
        self.rows = rows

    def samples(self, pad_token_id: int) -> Experience:
        """Return all chosen responses, then all rejected responses, as samples."""
        images = self.image_inputs
        return Experience.from_responses(
            [*self.prompt_ids, *self.prompt_ids],
            [*self.chosen_ids, *self.rejected_ids],
            pad_token_id,
            groups=[*self.rows, *self.rows],
            image_inputs=images and [*images, *images],
        )


class UnpairedBatch(LabelledBatch[bool]):
    """The judged responses of one step on one rank: the label of a desirable response is True."""

    __slots__ = ()


class PreferenceDataModule(StepDataModule[PairBatch | UnpairedBatch]):
    """Data module of preferences: a `PairBatch` for every step, or an `UnpairedBatch` if `label_key` is set.

    Args:
        train: rows for training.
        validation: rows for validation.
        chosen_key: dotted key of the better response's text, such as `chosen` or `extra_info.chosen`.
        rejected_key: dotted key of the worse response's text.
        margin_key: dotted key of a number, the difference in quality of the pair; None for margins of 0.
        response_key: dotted key of an unpaired response's text.
        label_key: dotted key of an unpaired response's label, true (desirable) or false; None for pairs.
        validate_on: `prompts` serves the prompts of validation rows as `PromptBatch`, and the rows need no responses;
            `responses` serves validation rows like training rows.
        max_response_tokens: longest response, in tokens, end of sequence included.
        options: further options of `StepDataModule`.
    """

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        margin_key: str | None = None,
        response_key: str = "response",
        label_key: str | None = None,
        validate_on: ValidateOn = "prompts",
        max_response_tokens: int = 1024,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(train, validation, **options)
        if validate_on not in ("prompts", "responses"):
            raise ConfigError(f"validate_on={validate_on!r}: choose 'prompts' or 'responses'")
        if label_key is not None and margin_key is not None:
            raise ConfigError(
                f"label_key={label_key!r} is for unpaired data, and margin_key={margin_key!r} is for pairs: leave one "
                "of them out"
            )
        self.chosen_key, self.rejected_key, self.margin_key = chosen_key, rejected_key, margin_key
        self.response_key, self.label_key = response_key, label_key
        self.validate_on = validate_on
        check_ranges(int, AT_LEAST_1, max_response_tokens=max_response_tokens)
        self.max_response_tokens = max_response_tokens

    def columns(self, split: str) -> Sequence[str]:
        """Return the columns every row must have; rows need a reward only if validation generates responses."""
        return COLUMNS if split == "validation" and self.validate_on == "prompts" else UNSCORED_COLUMNS

    def build(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str
    ) -> TokenizedColumns[PairBatch] | TokenizedColumns[UnpairedBatch] | TokenizedPrompts:
        """Tokenise prompts and responses and apply the limits.

        Raises:
            ConfigError: a row lacks a text, a margin or a label, or its two responses are equal.
        """
        prompts = self.build_prompts(rows, tokenizer)
        if split == "validation" and self.validate_on == "prompts":
            return prompts
        if self.label_key is not None:
            return self._build_unpaired(rows, tokenizer, prompts, self.label_key)
        return self._build_pairs(rows, tokenizer, prompts)

    def _build_pairs(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, prompts: TokenizedPrompts
    ) -> TokenizedColumns[PairBatch]:
        def pairs() -> Iterator[Pair]:
            for number, row in enumerate(rows):
                yield read_pair(row, self.chosen_key, self.rejected_key, self.margin_key, rows.location(number))

        chosen_ids = self.tokenize_responses(rows, (pair.chosen for pair in pairs()), tokenizer, prompts)
        rejected_ids = self.tokenize_responses(rows, (pair.rejected for pair in pairs()), tokenizer, prompts)
        margins = np.fromiter((pair.margin for pair in pairs()), dtype=np.float64)
        longest = np.maximum(chosen_ids.lengths, rejected_ids.lengths)
        kept = self.within_limits(rows, prompts.kept, longest, self.max_response_tokens)
        return TokenizedColumns(
            {
                "prompt_ids": prompts.prompt_ids,
                "chosen_ids": chosen_ids,
                "rejected_ids": rejected_ids,
                "margins": margins,
            },
            kept,
            PairBatch,
            as_integers={"margins": lambda margins: margins.view(np.int64)},
            images=prompts.images,
        )

    def _build_unpaired(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, prompts: TokenizedPrompts, label_key: str
    ) -> TokenizedColumns[UnpairedBatch]:
        def judged() -> Iterator[tuple[str, bool]]:
            for number, row in enumerate(rows):
                yield read_judged(row, self.response_key, label_key, rows.location(number))

        response_ids = self.tokenize_responses(rows, (text for text, _ in judged()), tokenizer, prompts)
        labels = np.fromiter((label for _, label in judged()), dtype=np.bool_)
        kept = self.within_limits(rows, prompts.kept, response_ids.lengths, self.max_response_tokens)
        return TokenizedColumns(
            {"prompt_ids": prompts.prompt_ids, "response_ids": response_ids, "labels": labels},
            kept,
            UnpairedBatch,
            images=prompts.images,
        )
