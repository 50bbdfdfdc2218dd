"""Supervised fine-tuning from the same files: a prompt's messages, and a response under a dotted key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_plugins.data.columns import find_text
from rl_plugins.data.datamodule import StepDataModule
from rl_plugins.data.mixture import Source
from rl_plugins.data.parquet import Paths, PromptRows, RowSource
from rl_plugins.data.prompts import TokenizedPrompts, build_prompts
from rl_plugins.data.tokenization import digest, tokenize_responses, within_both
from rl_plugins.errors import ConfigError

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


class SFTDataModule(StepDataModule[SFTBatch]):
    """Serve `{"prompt_ids": ..., "response_ids": ...}`: lists of token ids; a response ends with eos."""

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        response_key: str = "reward_model.ground_truth",
        max_prompt_tokens: int = 1024,
        max_response_tokens: int = 1024,
        **options: Any,
    ) -> None:
        """Set the options; those that are not described here are `StepDataModule`'s.

        Args:
            train: rows for training.
            validation: rows whose prompts are to be answered in validation (as `PromptBatch`es).
            response_key: where a row holds its response, such as `reward_model.ground_truth` or
                `extra_info.answer`.
            max_prompt_tokens: longest prompt, in tokens, chat template included.
            max_response_tokens: longest response, in tokens, end-of-sequence included.
            options: `tokenizer`, `prompts_per_step`, `eval_batch_size`, `overlong_prompts`, `seed`,
                `chat_template_kwargs`.
        """
        super().__init__(train, validation, **options)
        self.response_key = response_key
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens

    def build(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str
    ) -> TokenizedPairs | TokenizedPrompts:
        """Tokenise prompts and responses, each once, and apply the limits; validation rows are prompts to answer.

        Raises:
            ConfigError: a row has no text under `response_key`, or the tokenizer no end-of-sequence token.
        """
        prompts = build_prompts(
            rows,
            tokenizer,
            template_options=self.chat_template_kwargs,
            max_prompt_tokens=self.max_prompt_tokens,
            overlong=self.overlong_prompts,
        )
        if split == "validation":
            return prompts
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"The tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token: set one.")
        response_ids = tokenize_responses(
            (find_text(row, self.response_key, "response_key", rows.where(number)) for number, row in enumerate(rows)),
            tokenizer,
        )
        kept = within_both(
            rows,
            prompts.kept,
            response_ids.lengths,
            max_prompt_tokens=self.max_prompt_tokens,
            max_response_tokens=self.max_response_tokens,
            overlong=self.overlong_prompts,
        )
        return TokenizedPairs(prompts.prompt_ids, response_ids, kept)
