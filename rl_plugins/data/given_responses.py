"""Responses that a row holds, with what is said of them: pairs, judged responses, labelled steps. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple

from rl_plugins.data.columns import find_label, find_list, find_number, find_text
from rl_plugins.data.parquet import Row
from rl_plugins.errors import RowError


class Pair(NamedTuple):
    """Two responses to a prompt.

    Attributes:
        chosen: the better one.
        rejected: the worse one.
        margin: by how much; 0 where the data does not say.
    """

    chosen: str
    rejected: str
    margin: float


def read_pair(row: Row, chosen_key: str, rejected_key: str, margin_key: str | None, where: str) -> Pair:
    """Return the pair of a row.

    Raises:
        RowError: a text or the margin is missing, or the texts are the same.
    """
    chosen = find_text(row, chosen_key, "chosen_key", where)
    rejected = find_text(row, rejected_key, "rejected_key", where)
    margin = 0.0 if margin_key is None else find_number(row, margin_key, "margin_key", where)
    if chosen == rejected:
        field = f"chosen_key={chosen_key!r} and rejected_key={rejected_key!r}"
        raise RowError(where, field, f"they hold the same text {chosen[:40]!r}: remove the row.")
    return Pair(chosen, rejected, margin)


def read_judged(row: Row, response_key: str, label_key: str, where: str) -> tuple[str, bool]:
    """Return the response of a row and whether it is desirable.

    Raises:
        RowError: either is missing or of another kind.
    """
    return find_text(row, response_key, "response_key", where), find_label(row, label_key, "label_key", where)


def read_steps(row: Row, steps_key: str, labels_key: str, where: str) -> tuple[list[str], list[float | None]]:
    """Return the steps of a row's response and the label of each: from 0 (wrong) to 1 (right), or None.

    Raises:
        RowError: steps or labels are missing or do not fit, or no step has a label.
    """
    steps = find_list(row, steps_key, "steps_key", where)
    labels = find_list(row, labels_key, "labels_key", where)
    in_steps, in_labels = f"steps_key={steps_key!r}", f"labels_key={labels_key!r}"
    for position, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise RowError(where, in_steps, f"step {position} is {step!r}, not a text.")
    if len(labels) != len(steps):
        raise RowError(
            where,
            in_labels,
            f"it has {len(labels)} labels for the {len(steps)} steps under {in_steps}: give every step one, null for "
            "none.",
        )
    for position, label in enumerate(labels):
        if label is not None and not (isinstance(label, int | float) and 0 <= label <= 1):
            raise RowError(
                where,
                in_labels,
                f"label {position} is {label!r}, not a number between 0 (wrong) and 1 (right), or null.",
            )
    if all(label is None for label in labels):
        raise RowError(where, in_labels, "it labels no step: remove the row.")
    return steps, labels
