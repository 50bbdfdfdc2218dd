"""Prompts: what the loader yields for one step on one rank, and the data module that makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from rl_plugins.data.curriculum import Curriculum, CurriculumConfig
from rl_plugins.data.datamodule import StepDataModule
from rl_plugins.data.mixture import Source
from rl_plugins.data.orders import Order
from rl_plugins.data.parquet import Paths, PromptRows, RowSource
from rl_plugins.data.sampler import BatchSource
from rl_plugins.data.tokenization import Overlong, accepted_messages, digest, tokenize_prompts, within_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptBatch:
    """The prompts of one step on one rank; read only.

    Not a dataclass: Lightning rebuilds those when it moves a batch or converts its precision, and fails on
    frozen ones. This class passes through untouched.

    Attributes:
        prompt_ids: token ids of each prompt, up to the start of the assistant's turn.
        rows: number of each prompt's row in the concatenated data set: the prompt's identity.
        columns: every column of those rows, the messages under "prompt" included.
        epoch: the pass over the data to which the step belongs, from 0.
    """

    __slots__ = ("columns", "epoch", "prompt_ids", "rows")

    def __init__(self, prompt_ids: list[list[int]], rows: list[int], columns: dict[str, list[Any]], epoch: int) -> None:
        """Set the fields."""
        self.prompt_ids = prompt_ids
        self.rows = rows
        self.columns = columns
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.rows)

    def __repr__(self) -> str:
        """Name the rows, not their content."""
        return f"PromptBatch(epoch={self.epoch}, rows={self.rows})"


@dataclass(frozen=True)
class TokenizedPrompts:
    """Rows with their token ids.

    Attributes:
        rows: all rows of the data set.
        prompt_ids: token ids of each of them.
        kept: int64 [N], numbers of the rows to serve.
    """

    rows: PromptRows
    prompt_ids: Sequence[list[int]]
    kept: np.ndarray

    def __len__(self) -> int:
        """Return the number of rows to serve."""
        return len(self.kept)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the rows to serve: their numbers and token ids."""
        return digest(chain([self.kept], map(self.prompt_ids.__getitem__, self.kept)))

    def batch(self, indices: Sequence[int], epoch: int) -> PromptBatch:
        """Return the prompts at these indices; a column that a row lacks is None there."""
        numbers = self.kept[indices].tolist()
        rows = [self.rows.rows[number] for number in numbers]
        return PromptBatch(
            prompt_ids=[self.prompt_ids[number] for number in numbers],
            rows=numbers,
            columns={name: [row.get(name) for row in rows] for name in self.rows.columns},
            epoch=epoch,
        )


class PromptDataModule(StepDataModule[PromptBatch]):
    """Serve a `PromptBatch` for every step."""

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        max_prompt_tokens: int = 1024,
        curriculum: CurriculumConfig | None = None,
        **options: Any,
    ) -> None:
        """Set the options; those that are not described here are `StepDataModule`'s.

        Args:
            train: rows for training.
            validation: rows for validation.
            max_prompt_tokens: longest prompt, in tokens, chat template included.
            curriculum: draw prompts by how the policy did on them so far; off by default. Needs a stage that samples.
            options: `tokenizer`, `prompts_per_step`, `eval_batch_size`, `overlong_prompts`, `seed`,
                `chat_template_kwargs`.
        """
        super().__init__(train, validation, **options)
        self.max_prompt_tokens = max_prompt_tokens
        self.curriculum = curriculum

    @override
    def order(self, source: BatchSource[Any]) -> Order | None:
        if self.curriculum is None:
            return super().order(source)
        return Curriculum(
            self.mixture(source),
            self.curriculum,
            kept=source.kept,
            prompts_per_step=self.prompts_per_step,
            seed=self.seed,
        )

    def build(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str) -> TokenizedPrompts:
        """Tokenise the prompts and apply `max_prompt_tokens`."""
        return build_prompts(
            rows,
            tokenizer,
            template_options=self.chat_template_kwargs,
            max_prompt_tokens=self.max_prompt_tokens,
            overlong=self.overlong_prompts,
        )


def build_prompts(
    rows: PromptRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_options: Mapping[str, Any],
    max_prompt_tokens: int,
    overlong: Overlong,
) -> TokenizedPrompts:
    """Tokenise the prompts and apply the limit.

    Raises:
        RowError: the chat template refuses a prompt.
        ConfigError: a prompt is too long and `overlong` is "error", or all are.
    """
    messages = accepted_messages(rows, tokenizer, template_options)
    prompt_ids = tokenize_prompts(messages, tokenizer, template_options)
    kept = within_limit(
        rows, prompt_ids.lengths, option="max_prompt_tokens", limit=max_prompt_tokens, overlong=overlong
    )
    return TokenizedPrompts(rows, prompt_ids, kept)
