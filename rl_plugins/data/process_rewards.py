"""Data of process reward models: responses in steps, each labelled as right, wrong, or between the two.

A row holds the texts of the steps and one label per step under dotted keys. Every step is tokenised by itself. A step
ends with the separator, the last step with the end-of-sequence token; the label is on the last token of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Unpack

import numpy as np

from rl_plugins.config.settings import AT_LEAST_1, check_ranges
from rl_plugins.data.datamodule import StepDataModule, StepOptions
from rl_plugins.data.formats import STEP_SEPARATOR, read_steps, separated_steps
from rl_plugins.data.labelled import LabelledBatch
from rl_plugins.data.on_disk import MappedLists
from rl_plugins.data.orders import Source
from rl_plugins.data.parquet import UNSCORED_COLUMNS, Paths, PromptRows, RowSource
from rl_plugins.data.prompts import TokenizedColumns, TokenizedPrompts
from rl_plugins.data.reasoning import without_second_think
from rl_plugins.data.tokenization import ResponseEnd, TokenizerRefusal, encode_texts
from rl_plugins.errors import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LABEL = math.nan


class ProcessRewardBatch(LabelledBatch[list[float]]):
    """The responses of one step on one rank, with labelled steps.

    The labels are one number per response token: 0 (wrong) to 1 (right) on the last token of a step, NaN elsewhere.
    """

    __slots__ = ()


class ProcessRewardDataModule(StepDataModule[ProcessRewardBatch]):
    """Data module of labelled steps: a `ProcessRewardBatch` for every step and for validation.

    Args:
        train: rows for training.
        validation: rows for validation.
        steps_key: dotted key of a row's list of texts, one per step.
        labels_key: dotted key of a row's list of labels, one per step: 1 (or true) for a right step, 0 for a wrong
            step, a number between them for the probability that the step is right, null for a step without a label.
        step_separator: text at the end of every step but the last.
        max_response_tokens: longest response, in tokens, end of sequence included.
        options: further options of `StepDataModule`.
    """

    def __init__(
        self,
        train: Source | None,
        validation: Paths | RowSource | None = None,
        *,
        steps_key: str = "extra_info.steps",
        labels_key: str = "extra_info.labels",
        step_separator: str = STEP_SEPARATOR,
        max_response_tokens: int = 1024,
        **options: Unpack[StepOptions],
    ) -> None:
        super().__init__(train, validation, **options)
        self.steps_key, self.labels_key = steps_key, labels_key
        self.step_separator = step_separator
        check_ranges(int, AT_LEAST_1, max_response_tokens=max_response_tokens)
        self.max_response_tokens = max_response_tokens

    def columns(self, split: str) -> Sequence[str]:
        """Return the columns every row must have; rows with labels need no reward."""
        return UNSCORED_COLUMNS

    def build(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str
    ) -> TokenizedColumns[ProcessRewardBatch]:
        """Tokenise prompts and steps and apply the limits.

        Raises:
            ConfigError: a row has no steps, or another number of labels than steps.
        """
        prompts = self.build_prompts(rows, tokenizer)
        response_ids = MappedLists(ids for ids, _ in self._responses(rows, tokenizer, prompts))
        labels = MappedLists((labels for _, labels in self._responses(rows, tokenizer, prompts)), np.float64)
        kept = self.within_limits(rows, prompts.kept, response_ids.lengths, self.max_response_tokens)
        return TokenizedColumns(
            {"prompt_ids": prompts.prompt_ids, "response_ids": response_ids, "labels": labels},
            kept,
            ProcessRewardBatch,
            as_integers={"labels": lambda labels: [-1 if math.isnan(one) else round(1000 * one) for one in labels]},
            images=prompts.images,
        )

    def _responses(
        self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, prompts: TokenizedPrompts
    ) -> Iterator[tuple[list[int], list[float]]]:
        """Yield the token ids and the token labels of each row's response."""
        end = ResponseEnd.of(tokenizer)
        for number, row in enumerate(rows):
            steps, labels = read_steps(row, self.steps_key, self.labels_key, rows.location(number))
            texts = separated_steps(steps, self.step_separator)
            texts[0] = without_second_think(texts[0], tokenizer, prompts.prompt_ids[number])
            try:
                ids_of_steps = encode_texts(texts, tokenizer)
            except TokenizerRefusal as refusal:
                raise RowError(rows.location(number), self.steps_key, str(refusal)) from None
            ids_of_steps[-1] = end.added_to(ids_of_steps[-1])
            response: list[int] = []
            labels_of_tokens: list[float] = []
            for ids, label in zip(ids_of_steps, labels, strict=True):
                response += ids
                if not ids:  # the step was the second `<think>` alone
                    continue
                labels_of_tokens += [NO_LABEL] * (len(ids) - 1) + [NO_LABEL if label is None else float(label)]
            yield response, labels_of_tokens
