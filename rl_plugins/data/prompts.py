"""Tokenised rows in memory-mapped columns, and the batch of prompts for one step on one rank.

`TokenizedPrompts` serves prompts with all columns of their rows; `TokenizedColumns` serves given responses and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rl_plugins.data.chat_template import TemplateRefusal, accepted_messages, check_texts
from rl_plugins.data.image_prompts import ImagePromptEncoder, ImagesOfRows
from rl_plugins.data.images import (
    IMAGE_FAULT,
    IMAGE_INPUTS,
    IMAGES,
    PROMPT_IMAGES,
    PromptImages,
    any_has_images,
    inputs_of,
)
from rl_plugins.data.on_disk import MappedLists
from rl_plugins.data.parquet import PromptRows
from rl_plugins.data.tokenization import FilterOrError, TokenizerRefusal, digest, tokenize_prompts, within_limit
from rl_plugins.errors import ConfigError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Batch = TypeVar("Batch")
_ATTEMPTS = 100
"""Largest number of rows that are read in the place of a row whose images became bad."""


class RowBatch:
    """Rows of one step on one rank; read only.

    Not a dataclass: Lightning rebuilds dataclasses when it moves a batch or converts its precision, and fails on frozen
    ones. Lightning passes an object of this class through unchanged.

    Attributes:
        rows: number of each row in the concatenated data set.
    """

    __slots__ = ()
    rows: list[int]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __repr__(self) -> str:
        """Return the numbers of the rows without their content."""
        return f"{type(self).__name__}(rows={self.rows})"


class PromptBatch(RowBatch):
    """The prompts of one step on one rank; read only.

    Attributes:
        prompt_ids: token ids of each prompt, up to the start of the assistant's turn.
        rows: number of each prompt's row in the concatenated data set, which identifies the prompt.
        columns: every column of the rows, with the messages under "prompt".
        epoch: number of the step's pass over the data, from 0.
    """

    __slots__ = ("columns", "epoch", "prompt_ids", "rows")

    def __init__(self, prompt_ids: list[list[int]], rows: list[int], columns: dict[str, list[Any]], epoch: int) -> None:
        """Set the fields."""
        self.prompt_ids = prompt_ids
        self.rows = rows
        self.columns = columns
        self.epoch = epoch

    @classmethod
    def concat(cls, batches: Sequence[PromptBatch]) -> PromptBatch:
        """Return one batch of the prompts of several batches; a missing column of a batch is None for its prompts."""
        names = {name: None for batch in batches for name in batch.columns}
        return cls(
            [ids for batch in batches for ids in batch.prompt_ids],
            [row for batch in batches for row in batch.rows],
            {name: [v for batch in batches for v in batch.columns.get(name, [None] * len(batch))] for name in names},
            batches[0].epoch,
        )

    def state(self) -> dict[str, Any]:
        """Return the prompts for `torch.save`."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        if PROMPT_IMAGES in self.columns:
            images = [found and found.state() for found in self.columns[PROMPT_IMAGES]]
            fields["columns"] = {**self.columns, PROMPT_IMAGES: images}
        return fields

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PromptBatch:
        """Return the prompts of a `state`."""
        columns = dict(state["columns"])
        if PROMPT_IMAGES in columns:
            columns[PROMPT_IMAGES] = [found and PromptImages.from_state(found) for found in columns[PROMPT_IMAGES]]
        return cls(**{**state, "columns": columns})

    def single(self, position: int) -> PromptBatch:
        """Return a batch of the prompt at a position."""
        columns = {name: [values[position]] for name, values in self.columns.items()}
        return PromptBatch([self.prompt_ids[position]], [self.rows[position]], columns, self.epoch)


def foreign_batch(batch: object, data_module: str) -> ConfigError:
    """Return the error of a stage that cannot read a batch, such as a batch of a project's own data module.

    Args:
        batch: the batch.
        data_module: data module with batches for the stage.
    """
    return ConfigError(
        f"the stage cannot read the batches of this data, each a {type(batch).__name__}: pass "
        f"datamodule=rl_plugins.{data_module}(...) to the trainer in place of your data module or loader"
    )


@dataclass(frozen=True)
class TokenizedPrompts:
    """Rows with the token ids of their prompts.

    Attributes:
        rows: all rows of the data set.
        prompt_ids: token ids of each row's prompt.
        kept: int64 [N], numbers of the rows to serve.
        images: images of each row; None if no row has images.
    """

    rows: PromptRows
    prompt_ids: Sequence[list[int]]
    kept: np.ndarray
    images: ImagesOfRows | None = None

    def __len__(self) -> int:
        """Return the number of rows to serve."""
        return len(self.kept)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the rows to serve: their numbers and token ids."""
        return digest(chain([self.kept], map(self.prompt_ids.__getitem__, self.kept)))

    def batch(self, indices: Sequence[int], epoch: int) -> PromptBatch:
        """Return the prompts at the indices; a column missing in a row is None there.

        A prompt whose images became bad after the start has text alone, and the fault as `IMAGE_FAULT`.
        """
        numbers = self.kept[indices].tolist()
        rows = [self.rows.rows[number] for number in numbers]
        columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in self.rows.columns}
        prompt_ids = [self.prompt_ids[number] for number in numbers]
        if self.images is not None:
            # The read images take the place of the files.
            columns.pop(IMAGES, None)
            prompts = [self.images.prompt(number, ids) for number, ids in zip(numbers, prompt_ids, strict=True)]
            prompt_ids = [ids for ids, _, _ in prompts]
            columns[PROMPT_IMAGES] = [images for _, images, _ in prompts]
            columns[IMAGE_FAULT] = [fault for _, _, fault in prompts]
        return PromptBatch(prompt_ids, numbers, columns, epoch)


@dataclass(frozen=True)
class TokenizedColumns(Generic[Batch]):
    """Token ids of prompts and responses, labels and margins, in columns.

    Attributes:
        columns: values of all rows under the name of the batch's argument: lists of numbers, or an array [N].
        kept: int64 [M], numbers of the rows to serve.
        make_batch: function that makes a batch of some rows. Its arguments are the columns by name, and `rows`, the
            numbers of the rows.
        as_integers: functions that turn the values of a column into integers for the fingerprint, by column. Token ids
            and truth values need none.
        images: images of each row, for an argument `image_inputs` with their inputs; None if no row has images. A row
            whose images became bad after the start is replaced by the next row.
    """

    columns: Mapping[str, Sequence[list[Any]] | np.ndarray]
    kept: np.ndarray
    make_batch: Callable[..., Batch]
    as_integers: Mapping[str, Callable[[Any], Sequence[int] | np.ndarray]] = field(default_factory=dict)
    images: ImagesOfRows | None = None

    def __len__(self) -> int:
        """Return the number of rows to serve."""
        return len(self.kept)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all served values."""
        return digest(self._served_values())

    def _served_values(self) -> Iterator[Sequence[int] | np.ndarray]:
        for name, column in self.columns.items():
            served = [column[self.kept]] if isinstance(column, np.ndarray) else map(column.__getitem__, self.kept)
            yield from map(self.as_integers[name], served) if name in self.as_integers else served

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the rows at the indices."""
        numbers, images = self.kept[indices].tolist(), self.images
        if images is not None:
            around = np.asarray(indices, dtype=np.int64)[:, None] + np.arange(min(_ATTEMPTS, len(self)))
            found = [images.first_read(near.tolist()) for near in self.kept[around % len(self)]]
            numbers = [number for number, _ in found]
        columns = {
            name: column[numbers].tolist() if isinstance(column, np.ndarray) else [column[n] for n in numbers]
            for name, column in self.columns.items()
        }
        if images is not None:
            columns[IMAGE_INPUTS] = inputs_of([of_row for _, of_row in found])
        return self.make_batch(rows=numbers, **columns)


def build_prompts(
    rows: PromptRows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template_options: Mapping[str, Any],
    max_prompt_tokens: int,
    overlong: FilterOrError,
    images: ImagePromptEncoder | None = None,
) -> TokenizedPrompts:
    """Tokenise the prompts and apply the limit.

    Args:
        rows: rows of the prompts.
        tokenizer: tokenizer with a chat template.
        template_options: further variables of the template.
        max_prompt_tokens: longest prompt, in tokens.
        overlong: "filter" leaves longer prompts out; "error" raises a ConfigError.
        images: maker of the inputs of images; None if the policy reads text alone.

    Raises:
        RowError: the chat template refuses a prompt; or a row has images, and the policy reads text alone.
        ConfigError: a prompt is too long and `overlong` is "error", or all prompts are too long.
    """
    prompt_ids, of_rows = tokenize_rows(rows, tokenizer, template_options, images)
    kept = within_limit(
        rows, prompt_ids.lengths, option="max_prompt_tokens", limit=max_prompt_tokens, overlong=overlong
    )
    if of_rows is not None:
        kept = kept[prompt_ids.lengths[kept] > 0]
        if not len(kept):
            raise ConfigError(f"every row has a bad image, such as {of_rows.prompts.dropped[0]}")
    return TokenizedPrompts(rows, prompt_ids, kept, of_rows)


def tokenize_rows(
    rows: PromptRows,
    tokenizer: PreTrainedTokenizerBase,
    template_options: Mapping[str, Any],
    images: ImagePromptEncoder | None = None,
) -> tuple[MappedLists, ImagesOfRows | None]:
    """Return the token ids of each row's prompt, and the images of each row; None if no row has images.

    Args:
        rows: rows of the prompts.
        tokenizer: tokenizer with a chat template.
        template_options: further variables of the template.
        images: maker of the inputs of images; None if the policy reads text alone.

    Raises:
        RowError: the chat template or the tokenizer refuses a prompt; or a row has images, and the policy reads text
            alone.
    """
    if images is not None and any_has_images(rows):
        return images.prompt_ids(rows, template_options), ImagesOfRows(rows, images, template_options)
    messages = accepted_messages(rows, tokenizer, template_options)
    try:
        return tokenize_prompts(messages, tokenizer, template_options), None
    except TemplateRefusal:
        # The roles are accepted, the texts are not: look for the row.
        check_texts(rows, tokenizer, template_options)
        raise
    except TokenizerRefusal as refusal:
        raise RowError(rows.location(refusal.number), "column 'prompt'", str(refusal)) from None
