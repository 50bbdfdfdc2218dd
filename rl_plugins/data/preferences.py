"""Preferences: pairs of responses to one prompt of which one is better, or single responses that are good or bad.

A row holds the texts under dotted keys, beside the columns of every prompt file. A response ends with the end of
sequence, as the policy must end it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rl_plugins.data.given_responses import Pair, read_judged, read_pair
from rl_plugins.data.mixture import Source
from rl_plugins.data.parquet import COLUMNS, UNSCORED_COLUMNS, Paths, PromptRows, RowSource
from rl_plugins.data.prompts import TokenizedPrompts
from rl_plugins.data.response_module import ResponseDataModule
from rl_plugins.data.tokenization import digest, tokenize_responses
from rl_plugins.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ValidateOn = Literal["prompts", "pairs"]


class PairBatch:
    """The pairs of one step on one rank; read only. (Not a dataclass, as `PromptBatch` is not.)

    Attributes:
        prompt_ids: token ids of each prompt.
        chosen_ids: token ids of the better response to it.
        rejected_ids: token ids of the worse one.
        margins: by how much the first is better; 0 where the data does not say.
        rows: number of each pair's row in the concatenated data set.
    """

    __slots__ = ("chosen_ids", "margins", "prompt_ids", "rejected_ids", "rows")

    def __init__(
        self,
        prompt_ids: list[list[int]],
        chosen_ids: list[list[int]],
        rejected_ids: list[list[int]],
        margins: list[float],
        rows: list[int],
    ) -> None:
        """Set the fields."""
        self.prompt_ids = prompt_ids
        self.chosen_ids = chosen_ids
        self.rejected_ids = rejected_ids
        self.margins = margins
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.rows)

    def __repr__(self) -> str:
        """Name the rows, not their content."""
        return f"PairBatch(rows={self.rows})"


class UnpairedBatch:
    """The judged responses of one step on one rank; read only. (Not a dataclass, as `PromptBatch` is not.)

    Attributes:
        prompt_ids: token ids of each prompt.
        response_ids: token ids of a response to it.
        labels: whether the response is desirable.
        rows: number of each row in the concatenated data set.
    """

    __slots__ = ("labels", "prompt_ids", "response_ids", "rows")

    def __init__(
        self, prompt_ids: list[list[int]], response_ids: list[list[int]], labels: list[bool], rows: list[int]
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
        return f"UnpairedBatch(rows={self.rows})"


@dataclass(frozen=True)
class TokenizedPreferencePairs:
    """Token ids and margins of all pairs, and the numbers of the rows to serve."""

    prompt_ids: Sequence[list[int]]
    chosen_ids: Sequence[list[int]]
    rejected_ids: Sequence[list[int]]
    margins: np.ndarray
    kept: np.ndarray

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all token ids and margins that are served."""
        columns = (self.prompt_ids, self.chosen_ids, self.rejected_ids)
        ids = (column[number] for column in columns for number in self.kept)
        return digest(chain(ids, [self.margins[self.kept].view(np.int64)]))

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.kept)

    def batch(self, indices: Sequence[int], epoch: int) -> PairBatch:
        """Return the pairs at these indices."""
        numbers = self.kept[indices].tolist()
        return PairBatch(
            prompt_ids=[self.prompt_ids[number] for number in numbers],
            chosen_ids=[self.chosen_ids[number] for number in numbers],
            rejected_ids=[self.rejected_ids[number] for number in numbers],
            margins=self.margins[numbers].tolist(),
            rows=numbers,
        )


@dataclass(frozen=True)
class TokenizedUnpaired:
    """Token ids and labels of all responses, and the numbers of the rows to serve."""

    prompt_ids: Sequence[list[int]]
    response_ids: Sequence[list[int]]
    labels: np.ndarray
    kept: np.ndarray

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all token ids and labels that are served."""
        ids = (column[number] for column in (self.prompt_ids, self.response_ids) for number in self.kept)
        return digest(chain(ids, [self.labels[self.kept]]))

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self.kept)

    def batch(self, indices: Sequence[int], epoch: int) -> UnpairedBatch:
        """Return the responses at these indices."""
        numbers = self.kept[indices].tolist()
        return UnpairedBatch(
            prompt_ids=[self.prompt_ids[number] for number in numbers],
            response_ids=[self.response_ids[number] for number in numbers],
            labels=self.labels[numbers].tolist(),
            rows=numbers,
        )


class PreferenceDataModule(ResponseDataModule[PairBatch | UnpairedBatch]):
    """Serve a `PairBatch` for every step, or an `UnpairedBatch` if rows hold one response and a label."""

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
        **options: Any,
    ) -> None:
        """Set the options; those that are not described here are `ResponseDataModule`'s.

        Args:
            train: rows for training.
            validation: rows for validation.
            chosen_key: where a row holds the text of the better response, such as `chosen` or `extra_info.chosen`.
            rejected_key: where it holds that of the worse one.
            margin_key: where it holds a number, by how much the first is better; None for margins of 0.
            response_key: of unpaired data, where a row holds the text of its response.
            label_key: of unpaired data, where it says true (desirable) or false; None for pairs.
            validate_on: `prompts` serves validation rows as prompts to be answered (`PromptBatch`), and they need no
                responses; `pairs` serves them as `PairBatch`es.
            options: `max_prompt_tokens`, `max_response_tokens`, and those of `StepDataModule`.
        """
        super().__init__(train, validation, **options)
        if validate_on not in ("prompts", "pairs"):
            raise ConfigError(f"validate_on={validate_on!r}: choose 'prompts' or 'pairs'.")
        if label_key is not None and (validate_on == "pairs" or margin_key is not None):
            other = "validate_on=pairs" if validate_on == "pairs" else f"margin_key={margin_key!r}"
            raise ConfigError(f"label_key={label_key!r} says that the data is unpaired, and {other} asks for pairs.")
        self.chosen_key, self.rejected_key, self.margin_key = chosen_key, rejected_key, margin_key
        self.response_key, self.label_key = response_key, label_key
        self.validate_on = validate_on

    def columns(self, split: str) -> Sequence[str]:
        """Responses that are given need no reward; those that validation generates do."""
        return COLUMNS if split == "validation" and self.validate_on == "prompts" else UNSCORED_COLUMNS

    def build(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str
    ) -> TokenizedPreferencePairs | TokenizedUnpaired | TokenizedPrompts:
        """Tokenise prompts and responses, each once, and apply the limits.

        Raises:
            ConfigError: a row lacks a text, a margin or a label, its two responses are the same, or the tokenizer has
                no end-of-sequence token.
        """
        prompts = self.build_prompts(rows, tokenizer)
        if split == "validation" and self.validate_on == "prompts":
            return prompts
        if self.label_key is not None:
            return self._unpaired(rows, tokenizer, prompts, self.label_key)
        return self._pairs(rows, tokenizer, prompts)

    def _pairs(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, prompts: TokenizedPrompts
    ) -> TokenizedPreferencePairs:
        def checked() -> Iterator[Pair]:
            for number, row in enumerate(rows):
                yield read_pair(row, self.chosen_key, self.rejected_key, self.margin_key, rows.where(number))

        chosen_ids = tokenize_responses((pair.chosen for pair in checked()), tokenizer)
        rejected_ids = tokenize_responses((pair.rejected for pair in checked()), tokenizer)
        margins = np.fromiter((pair.margin for pair in checked()), dtype=np.float64)
        kept = self.within_limits(prompts, np.maximum(chosen_ids.lengths, rejected_ids.lengths))
        return TokenizedPreferencePairs(prompts.prompt_ids, chosen_ids, rejected_ids, margins, kept)

    def _unpaired(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, prompts: TokenizedPrompts, label_key: str
    ) -> TokenizedUnpaired:
        def checked() -> Iterator[tuple[str, bool]]:
            for number, row in enumerate(rows):
                yield read_judged(row, self.response_key, label_key, rows.where(number))

        response_ids = tokenize_responses((text for text, _ in checked()), tokenizer)
        labels = np.fromiter((label for _, label in checked()), dtype=np.bool_)
        return TokenizedUnpaired(
            prompts.prompt_ids, response_ids, labels, self.within_limits(prompts, response_ids.lengths)
        )
