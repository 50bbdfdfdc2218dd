"""Supervised fine-tuning from the same files: a prompt's messages, and a response under a dotted key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_plugins.data.columns import find_text
from rl_plugins.data.mixture import Source
from rl_plugins.data.parquet import Paths, PromptRows, RowSource
from rl_plugins.data.prompts import TokenizedPrompts
from rl_plugins.data.response_module import ResponseDataModule
from rl_plugins.data.tokenization import digest, tokenize_responses

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SFTBatch = dict[str, list[list[int]]]


@dataclass(frozen=True)
class TokenizedPairs:
    """Token ids of all prompts and responses, and the numbers of the rows to serve."""

    prompt_ids: Sequence[list[int]]
    response_ids: Sequence[list[int]]
    kept: np.ndarray

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all token ids that are served."""
        return digest(ids[number] for ids in (self.prompt_ids, self.response_ids) for number in self.kept)

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.kept)

    def batch(self, indices: Sequence[int], epoch: int) -> SFTBatch:
        """Return the pairs at these indices."""
        numbers = self.kept[indices]
        return {
            "prompt_ids": [self.prompt_ids[number] for number in numbers],
            "response_ids": [self.response_ids[number] for number in numbers],
        }


class SFTDataModule(ResponseDataModule[SFTBatch]):
    """Serve `{"prompt_ids": ..., "response_ids": ...}`: lists of token ids; a response ends with eos."""

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        response_key: str = "reward_model.ground_truth",
        **options: Any,
    ) -> None:
        """Set the options; those that are not described here are `ResponseDataModule`'s.

        Args:
            train: rows for training.
            validation: rows whose prompts are to be answered in validation (as `PromptBatch`es).
            response_key: where a row holds its response, such as `reward_model.ground_truth` or
                `extra_info.answer`.
            options: `max_prompt_tokens`, `max_response_tokens`, and those of `StepDataModule`.
        """
        super().__init__(train, validation, **options)
        self.response_key = response_key

    def build(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str
    ) -> TokenizedPairs | TokenizedPrompts:
        """Tokenise prompts and responses, each once, and apply the limits; validation rows are prompts to answer.

        Raises:
            ConfigError: a row has no text under `response_key`, or the tokenizer no end-of-sequence token.
        """
        prompts = self.build_prompts(rows, tokenizer)
        if split == "validation":
            return prompts
        response_ids = tokenize_responses(
            (find_text(row, self.response_key, "response_key", rows.where(number)) for number, row in enumerate(rows)),
            tokenizer,
        )
        kept = self.within_limits(prompts, response_ids.lengths)
        return TokenizedPairs(prompts.prompt_ids, response_ids, kept)
