"""What the data modules of given responses share: two limits, and prompts that a response can follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rl_plugins.data.datamodule import Batch, StepDataModule
from rl_plugins.data.mixture import Source
from rl_plugins.data.parquet import Paths, PromptRows, RowSource
from rl_plugins.data.prompts import TokenizedPrompts, build_prompts
from rl_plugins.data.tokenization import within_limit
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ResponseDataModule(StepDataModule[Batch]):
    """Rows of a prompt and one or more responses, each of which ends with the end of sequence."""

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        max_prompt_tokens: int = 1024,
        max_response_tokens: int = 1024,
        **options: Any,
    ) -> None:
        """Set the options; those that are not described here are `StepDataModule`'s.

        Args:
            train: rows for training.
            validation: rows for validation.
            max_prompt_tokens: longest prompt, in tokens, chat template included.
            max_response_tokens: longest response, in tokens, end-of-sequence included.
            options: `tokenizer`, `prompts_per_step`, `eval_batch_size`, `overlong_prompts`, `seed`,
                `chat_template_kwargs`.
        """
        super().__init__(train, validation, **options)
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens

    def build_prompts(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase) -> TokenizedPrompts:
        """Tokenise the prompts and apply their limit.

        Raises:
            ConfigError: the tokenizer has no end-of-sequence token.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"The tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token: set one.")
        return build_prompts(
            rows,
            tokenizer,
            template_options=self.chat_template_kwargs,
            max_prompt_tokens=self.max_prompt_tokens,
            overlong=self.overlong_prompts,
        )

    def within_limits(self, prompts: TokenizedPrompts, response_lengths: np.ndarray) -> np.ndarray:
        """The numbers of the rows whose prompts and responses are within their limits.

        Raises:
            ConfigError: a response is longer and `overlong_prompts` is "error", or no row is left.
        """
        short = within_limit(
            prompts.rows,
            response_lengths,
            option="max_response_tokens",
            limit=self.max_response_tokens,
            overlong=self.overlong_prompts,
        )
        kept = np.intersect1d(prompts.kept, short, assume_unique=True)
        if not len(kept):
            raise ConfigError(
                f"Every row is longer than max_prompt_tokens={self.max_prompt_tokens} or "
                f"max_response_tokens={self.max_response_tokens}: raise them."
            )
        return kept
