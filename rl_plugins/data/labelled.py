"""Prompts with one labelled response each."""

from __future__ import annotations

from typing import Generic, TypeVar

from rl_plugins.data.experience import Experience
from rl_plugins.data.images import ImageInputs
from rl_plugins.data.prompts import RowBatch

Label = TypeVar("Label")


class LabelledBatch(RowBatch, Generic[Label]):
    """The labelled responses of one step on one rank; read only.

    Attributes:
        prompt_ids: token ids of each prompt.
        response_ids: token ids of the response to each prompt.
        labels: label of each response.
        rows: number of each row in the concatenated data set.
        image_inputs: inputs of the images of each prompt; None if no row has images.
    """

    __slots__ = ("image_inputs", "labels", "prompt_ids", "response_ids", "rows")

    def __init__(
        self,
        prompt_ids: list[list[int]],
        response_ids: list[list[int]],
        labels: list[Label],
        rows: list[int],
        image_inputs: list[ImageInputs | None] | None = None,
    ) -> None:
        """Set the fields."""
        self.prompt_ids = prompt_ids
        self.response_ids = response_ids
        self.labels = labels
        self.rows = rows
        self.image_inputs = image_inputs

    def samples(self, pad_token_id: int) -> Experience:
        """Return the responses as samples."""
        return Experience.from_responses(
            self.prompt_ids, self.response_ids, pad_token_id, groups=self.rows, image_inputs=self.image_inputs
        )
