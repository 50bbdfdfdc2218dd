"""Steps and their labels, for process reward models: each step of a response is right, wrong, or in between.

A row holds the texts of the steps and one label for each under dotted keys. Every step is tokenised by itself and ends
with the separator, the last one with the end of sequence; its label stands on the token that ends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_plugins.data.given_responses import read_steps
from rl_plugins.data.mixture import Source
from rl_plugins.data.on_disk import Ragged
from rl_plugins.data.parquet import UNSCORED_COLUMNS, Paths, PromptRows, RowSource
from rl_plugins.data.response_module import ResponseDataModule
from rl_plugins.data.tokenization import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LABEL = math.nan


class ProcessRewardBatch:
    """The labelled responses of one step on one rank; read only. (Not a dataclass, as `PromptBatch` is not.)

    Attributes:
        prompt_ids: token ids of each prompt.
        response_ids: token ids of each response.
        labels: one number per response token: 0 (wrong) to 1 (right) where a step ends, NaN elsewhere.
        rows: number of each row in the concatenated data set.
    """

    __slots__ = ("labels", "prompt_ids", "response_ids", "rows")

    def __init__(
        self, prompt_ids: list[list[int]], response_ids: list[list[int]], labels: list[list[float]], rows: list[int]
    ) -> None:
        """Set the fields."""
        self.prompt_ids = prompt_ids
        self.response_ids = response_ids
        self.labels = labels
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self.rows)

    def __repr__(self) -> str:
        """Name the rows, not their content."""
        return f"ProcessRewardBatch(rows={self.rows})"


@dataclass(frozen=True)
class TokenizedSteps:
    """Token ids of all prompts and responses, the labels of the responses' tokens, and the rows to serve."""

    prompt_ids: Sequence[list[int]]
    response_ids: Sequence[list[int]]
    labels: Sequence[list[float]]
    kept: np.ndarray

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all token ids that are served, and of their labels in thousandths."""
        ids = (column[number] for column in (self.prompt_ids, self.response_ids) for number in self.kept)
        return digest(chain(ids, (_thousandths(self.labels[number]) for number in self.kept)))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.kept)

    def batch(self, indices: Sequence[int], epoch: int) -> ProcessRewardBatch:
        """Return the rows at these indices."""
        numbers = self.kept[indices].tolist()
        return ProcessRewardBatch(
            prompt_ids=[self.prompt_ids[number] for number in numbers],
            response_ids=[self.response_ids[number] for number in numbers],
            labels=[self.labels[number] for number in numbers],
            rows=numbers,
        )


class ProcessRewardDataModule(ResponseDataModule[ProcessRewardBatch]):
    """Serve a `ProcessRewardBatch` for every step, and for validation."""

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        steps_key: str = "extra_info.steps",
        labels_key: str = "extra_info.labels",
        step_separator: str = "\n",
        **options: Any,
    ) -> None:
        """Set the options; those that are not described here are `ResponseDataModule`'s.

        Args:
            train: rows for training.
            validation: rows for validation.
            steps_key: where a row holds its list of texts, one per step.
            labels_key: where it holds as many labels: 1 (or true) for a right step, 0 for a wrong one, a number
                between them for how likely it is right, null for a step without a label.
            step_separator: ends every step but the last.
            options: `max_prompt_tokens`, `max_response_tokens`, and those of `StepDataModule`.
        """
        super().__init__(train, validation, **options)
        self.steps_key, self.labels_key = steps_key, labels_key
        self.step_separator = step_separator

    def columns(self, split: str) -> Sequence[str]:
        """The labels stand for a reward."""
        return UNSCORED_COLUMNS

    def build(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str) -> TokenizedSteps:
        """Tokenise prompts and steps, each once, and apply the limits.

        Raises:
            ConfigError: a row has no steps or no labels that fit them, or the tokenizer no end-of-sequence token.
        """
        prompts = self.build_prompts(rows, tokenizer)
        response_ids = Ragged(ids for ids, _ in self._responses(rows, tokenizer))
        labels = Ragged((labels for _, labels in self._responses(rows, tokenizer)), np.float64)
        kept = self.within_limits(prompts, response_ids.lengths)
        return TokenizedSteps(prompts.prompt_ids, response_ids, labels, kept)

    def _responses(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Token ids of the steps of each row one after the other, and the labels of those tokens."""
        for number, row in enumerate(rows):
            steps, labels = read_steps(row, self.steps_key, self.labels_key, rows.where(number))
            texts = [f"{step}{self.step_separator}" for step in steps[:-1]] + steps[-1:]
            ids_of_steps = tokenizer(texts, add_special_tokens=False)["input_ids"]
            ids_of_steps[-1] = [*ids_of_steps[-1], tokenizer.eos_token_id]
            response: list[int] = []
            labels_of_tokens: list[float] = []
            for ids, label in zip(ids_of_steps, labels, strict=True):
                response += ids
                labels_of_tokens += [NO_LABEL] * (len(ids) - 1) + [NO_LABEL if label is None else float(label)]
            yield response, labels_of_tokens


def _thousandths(labels: Sequence[float]) -> list[int]:
    return [-1 if math.isnan(label) else round(1000 * label) for label in labels]
