"""Kinds of data files: the columns of their rows, and the texts, numbers and labels beside the prompt.

A row holds the values under dotted keys such as `extra_info.answer`. The functions read and check one row each; a
`RowError` names the row, the option that gives the key, and the value. No torch is needed, so `rl-plugins prepare`
makes the same checks as the data modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_plugins.config.data import DataConfig
from rl_plugins.data.content_parts import with_texts
from rl_plugins.data.conversations import MESSAGES, conversation_row, texts_of
from rl_plugins.data.dotted_keys import find
from rl_plugins.data.parquet import COLUMNS, UNSCORED_COLUMNS, Row, RowForm, check_row
from rl_plugins.errors import RowError

STEP_SEPARATOR = "\n"
"""Text at the end of every step of a response but the last, by default."""
LABEL_KEY = "label"
"""Dotted key of the label of a judged response, if `data.label_key` is null."""
MESSAGES_KEY = "messages"
"""Dotted key of a conversation, if `data.messages_key` is null."""
CONVERSATIONS = "conversations"
"""Name of the format of whole conversations."""

# Values under dotted keys -----------------------------------------------------------------------------------------


def find_text(row: Row, key: str, option: str, location: str) -> str:
    """Return the text under a dotted key.

    Raises:
        RowError: the row has no such key, or the value is not a text or is empty.
    """
    text: str = _find(row, key, option, location, "a text", lambda value: isinstance(value, str) and value.strip())
    return text


def _find(row: Row, key: str, option: str, location: str, expected: str, fits: Callable[[Any], object]) -> Any:
    """Return the value under a dotted key, or raise a RowError for a value that does not fit."""
    value = find(row, key, option, location)
    if not fits(value):
        raise RowError(location, f"{option}={key!r}", f"holds {value!r}, not {expected}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


# Responses of a row -----------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """Two responses to one prompt.

    Attributes:
        chosen: text of the better response.
        rejected: text of the worse response.
        margin: difference in quality; 0 if the data has no margins.
    """

    chosen: str
    rejected: str
    margin: float


def read_pair(row: Row, chosen_key: str, rejected_key: str, margin_key: str | None, location: str) -> Pair:
    """Return the pair of a row.

    Raises:
        RowError: a text or the margin is missing, or the texts are equal.
    """
    chosen = find_text(row, chosen_key, "chosen_key", location)
    rejected = find_text(row, rejected_key, "rejected_key", location)
    margin = 0.0
    if margin_key is not None:
        margin = float(_find(row, margin_key, "margin_key", location, "a finite number", _is_number))
    if chosen == rejected:
        field = f"chosen_key={chosen_key!r} and rejected_key={rejected_key!r}"
        raise RowError(location, field, f"they hold the same text {chosen[:40]!r}: remove the row")
    return Pair(chosen, rejected, margin)


def read_judged(row: Row, response_key: str, label_key: str, location: str) -> tuple[str, bool]:
    """Return the response of a row, and True if the response is desirable.

    Raises:
        RowError: the response or the label is missing or of another type.
    """
    response, expected = find_text(row, response_key, "response_key", location), "true (desirable) or false"
    return response, _find(row, label_key, "label_key", location, expected, lambda value: isinstance(value, bool))


def read_steps(row: Row, steps_key: str, labels_key: str, location: str) -> tuple[list[str], list[float | None]]:
    """Return the steps of a row's response and one label per step: from 0 (wrong) to 1 (right), or None.

    Raises:
        RowError: steps or labels are missing, differ in number or are of another type, or no step has a label.
    """
    steps, labels = (
        list(_find(row, key, option, location, "a list with an entry for every step", _is_list))
        for option, key in (("steps_key", steps_key), ("labels_key", labels_key))
    )
    steps_field, labels_field = f"steps_key={steps_key!r}", f"labels_key={labels_key!r}"
    for position, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise RowError(location, steps_field, f"step {position} is {step!r}, not a text")
    if len(labels) != len(steps):
        raise RowError(
            location,
            labels_field,
            f"it has {len(labels)} labels for the {len(steps)} steps under {steps_field}: give every step one label, "
            "null for a step without a judgement",
        )
    for position, label in enumerate(labels):
        if label is not None and not (isinstance(label, int | float) and 0 <= label <= 1):
            raise RowError(
                location,
                labels_field,
                f"label {position} is {label!r}, not a number between 0 (wrong) and 1 (right), or null",
            )
    if all(label is None for label in labels):
        raise RowError(location, labels_field, "it labels no step: remove the row")
    return steps, labels


def separated_steps(steps: Sequence[str], separator: str = STEP_SEPARATOR) -> list[str]:
    """Return the steps of a response, each but the last with the separator at its end."""
    return [*(f"{step}{separator}" for step in steps[:-1]), steps[-1]]


# Kinds of files ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A kind of data file.

    Attributes:
        columns: names of the columns every row must have.
        read: function that reads the values beside the prompt. It raises a RowError if a value is missing or wrong.
        responses: function of the values of `read`; returns each response as texts that are tokenised one by one.
        form: function that checks a row and returns the row in the form of all other functions; None for `check_row`.
    """

    columns: Sequence[str]
    read: Callable[[Row, DataConfig, str], Any]
    responses: Callable[[Any], Sequence[Sequence[str]]]
    form: Callable[[Row, DataConfig, str], Row] | None = None

    def form_of(self, keys: DataConfig) -> RowForm | None:
        """Return the form of the rows for `load_rows`; None for rows with prompts."""
        form = self.form
        return None if form is None else lambda row, location: form(row, keys, location)

    def checked(self, row: Row, keys: DataConfig, location: str) -> Row:
        """Check a row, and return the row with texts in its messages.

        Raises:
            RowError: the row is malformed. The message names the location, the field and the reason.
        """
        if self.form is not None:
            return self.form(row, keys, location)
        check_row(row, location, self.columns)
        self.read(row, keys, location)
        return with_texts(row)


FORMATS = {
    "prompts": Format(COLUMNS, lambda row, keys, location: None, lambda nothing: []),
    "sft": Format(
        UNSCORED_COLUMNS,
        lambda row, keys, location: find_text(row, keys.response_key, "response_key", location),
        lambda response: [[response]],
    ),
    CONVERSATIONS: Format(
        (),
        lambda row, keys, location: row[MESSAGES],
        lambda messages: [[text for message in messages for text in texts_of(message)]],
        lambda row, keys, location: conversation_row(
            row, MESSAGES_KEY if keys.messages_key is None else keys.messages_key, keys.tools_key, location
        ),
    ),
    "preferences": Format(
        UNSCORED_COLUMNS,
        lambda row, keys, location: read_pair(row, keys.chosen_key, keys.rejected_key, keys.margin_key, location),
        lambda pair: [[pair.chosen], [pair.rejected]],
    ),
    "judged": Format(
        UNSCORED_COLUMNS,
        lambda row, keys, location: read_judged(
            row, keys.response_key, LABEL_KEY if keys.label_key is None else keys.label_key, location
        ),
        lambda judged: [judged[:1]],
    ),
    "steps": Format(
        UNSCORED_COLUMNS,
        lambda row, keys, location: read_steps(row, keys.steps_key, keys.labels_key, location),
        lambda labelled: [separated_steps(labelled[0])],
    ),
}
"""Prompts without responses; responses to learn; whole conversations; pairs; single judged responses; responses in
labelled steps.
"""
