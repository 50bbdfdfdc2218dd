"""Steps and their labels, for process reward models: each step of a response is right, wrong, or in between.

A row holds the texts of the steps and one label for each under dotted keys. Every step is tokenised by itself and ends
with the separator, the last one with the end of sequence; its label stands on the token that ends it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rl_plugins.data.columns import find, refuse
from rl_plugins.data.datamodule import StepDataModule
from rl_plugins.data.parquet import UNSCORED_COLUMNS, Paths, PromptRows, Row, RowSource
from rl_plugins.data.prompts import build_prompts
from rl_plugins.data.tokenization import digest, within_limit
from rl_plugins.errors import ConfigError

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
    """Token ids of prompts and responses, and the labels of the responses' tokens, of the rows to serve."""

    prompt_ids: Sequence[list[int]]
    response_ids: Sequence[list[int]]
    labels: Sequence[list[float]]
    rows: Sequence[int]

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all token ids, and of the labels in thousandths."""
        thousandths = [[-1 if math.isnan(label) else round(1000 * label) for label in row] for row in self.labels]
        return digest([*self.prompt_ids, *self.response_ids, *thousandths])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def batch(self, indices: Sequence[int], epoch: int) -> ProcessRewardBatch:
        """Return the rows at these indices."""
        return ProcessRewardBatch(
            prompt_ids=[self.prompt_ids[index] for index in indices],
            response_ids=[self.response_ids[index] for index in indices],
            labels=[self.labels[index] for index in indices],
            rows=[self.rows[index] for index in indices],
        )


class ProcessRewardDataModule(StepDataModule[ProcessRewardBatch]):
    """Serve a `ProcessRewardBatch` for every step, and for validation."""

    def __init__(
        self,
        train: Paths | RowSource | None,
        validation: Paths | RowSource | None = None,
        *,
        steps_key: str = "extra_info.steps",
        labels_key: str = "extra_info.labels",
        step_separator: str = "\n",
        max_prompt_tokens: int = 1024,
        max_response_tokens: int = 1024,
        **options: Any,
    ) -> None:
        """Set the options; those that are not described here are `StepDataModule`'s.

        Args:
            train: rows for training.
            validation: rows for validation.
            steps_key: where a row holds its list of texts, one per step.
            labels_key: where it holds as many labels: 1 (or true) for a right step, 0 for a wrong one, a number
                between them for how likely it is right, null for a step without a label.
            step_separator: ends every step but the last.
            max_prompt_tokens: longest prompt, in tokens, chat template included.
            max_response_tokens: longest response, in tokens, end-of-sequence included.
            options: `tokenizer`, `prompts_per_step`, `eval_batch_size`, `overlong_prompts`, `seed`,
                `chat_template_kwargs`.
        """
        super().__init__(train, validation, **options)
        self.steps_key, self.labels_key = steps_key, labels_key
        self.step_separator = step_separator
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens

    def columns(self, split: str) -> Sequence[str]:
        """The labels stand for a reward."""
        return UNSCORED_COLUMNS

    def build(self, rows: PromptRows, tokenizer: PreTrainedTokenizerBase, split: str) -> TokenizedSteps:
        """Tokenise prompts and steps, each once, and apply the limits.

        Raises:
            ConfigError: a row has no steps or no labels that fit them, or the tokenizer no end-of-sequence token.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError(f"The tokenizer {tokenizer.name_or_path!r} has no end-of-sequence token: set one.")
        limits: dict[str, Any] = {"overlong": self.overlong_prompts}
        prompts = build_prompts(
            rows,
            tokenizer,
            template_options=self.chat_template_kwargs,
            max_prompt_tokens=self.max_prompt_tokens,
            **limits,
        )
        responses = [self._response(row, rows.where(number), tokenizer) for number, row in enumerate(rows.rows)]
        lengths = [len(ids) for ids, _ in responses]
        short = within_limit(rows, lengths, option="max_response_tokens", limit=self.max_response_tokens, **limits)
        kept = sorted(set(prompts.kept) & set(short))
        if not kept:
            raise ConfigError(
                f"Every row is longer than max_prompt_tokens={self.max_prompt_tokens} or "
                f"max_response_tokens={self.max_response_tokens}: raise them."
            )
        return TokenizedSteps(
            [prompts.prompt_ids[i] for i in kept],
            [responses[i][0] for i in kept],
            [responses[i][1] for i in kept],
            kept,
        )

    def _response(self, row: Row, where: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[float]]:
        """Token ids of the steps one after the other, and the labels of those tokens."""
        steps, labels = self._checked_steps(row, where)
        texts = [f"{step}{self.step_separator}" for step in steps[:-1]] + steps[-1:]
        ids_of_steps = tokenizer(texts, add_special_tokens=False)["input_ids"]
        ids_of_steps[-1] = [*ids_of_steps[-1], tokenizer.eos_token_id]
        response: list[int] = []
        labels_of_tokens: list[float] = []
        for ids, label in zip(ids_of_steps, labels, strict=True):
            response += ids
            labels_of_tokens += [NO_LABEL] * (len(ids) - 1) + [NO_LABEL if label is None else float(label)]
        return response, labels_of_tokens

    def _checked_steps(self, row: Row, where: str) -> tuple[list[str], list[float | None]]:
        steps = _find_list(row, self.steps_key, "steps_key", where)
        labels = _find_list(row, self.labels_key, "labels_key", where)
        for position, step in enumerate(steps):
            if not isinstance(step, str) or not step.strip():
                raise ConfigError(f"{where}: steps_key={self.steps_key!r}: step {position} is {step!r}, not a text.")
        if len(labels) != len(steps):
            raise ConfigError(
                f"{where}: labels_key={self.labels_key!r} has {len(labels)} labels for the {len(steps)} steps under "
                f"steps_key={self.steps_key!r}: give every step one, null for none."
            )
        for position, label in enumerate(labels):
            if label is not None and not (isinstance(label, int | float) and 0 <= label <= 1):
                raise ConfigError(
                    f"{where}: labels_key={self.labels_key!r}: label {position} is {label!r}, not a number between 0 "
                    "(wrong) and 1 (right), or null."
                )
        if all(label is None for label in labels):
            raise ConfigError(f"{where}: labels_key={self.labels_key!r} labels no step: remove the row.")
        return steps, labels


def _find_list(row: Row, key: str, option: str, where: str) -> list[Any]:
    value = find(row, key, option, where)
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        refuse(where, option, key, value, "a list with an entry for every step")
    return list(value)
