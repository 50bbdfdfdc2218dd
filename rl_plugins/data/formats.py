"""What the rows of each kind of data file hold beside the prompt: the checks of the data modules, without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.data.columns import find_text
from rl_plugins.data.given_responses import read_judged, read_pair, read_steps
from rl_plugins.data.parquet import COLUMNS, UNSCORED_COLUMNS, Row, check_row


@dataclass(frozen=True)
class Keys:
    """Where a row holds what its format asks for; the names and defaults of the options of `data`.

    Attributes:
        response_key: the response of SFT or of a judged row.
        chosen_key: the better response of a pair.
        rejected_key: the worse one.
        margin_key: by how much; None where the data does not say.
        label_key: whether a judged response is good.
        steps_key: the steps of a response.
        labels_key: their labels.
    """

    response_key: str = "reward_model.ground_truth"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str | None = None
    label_key: str = "label"
    steps_key: str = "extra_info.steps"
    labels_key: str = "extra_info.labels"


@dataclass(frozen=True)
class Format:
    """A kind of data file.

    Attributes:
        columns: those that every row has.
        read: reads what a row holds beside them, and raises a RowError if it cannot.
    """

    columns: Sequence[str]
    read: Callable[[Row, Keys, str], Any]

    def check(self, row: Any, keys: Keys, where: str) -> None:
        """Raise a RowError that names `where`, the field and the reason unless the row is well formed."""
        check_row(row, where, self.columns)
        self.read(row, keys, where)


FORMATS = {
    "prompts": Format(COLUMNS, lambda row, keys, where: None),
    "sft": Format(COLUMNS, lambda row, keys, where: find_text(row, keys.response_key, "response_key", where)),
    "preferences": Format(
        UNSCORED_COLUMNS,
        lambda row, keys, where: read_pair(row, keys.chosen_key, keys.rejected_key, keys.margin_key, where),
    ),
    "judged": Format(
        UNSCORED_COLUMNS, lambda row, keys, where: read_judged(row, keys.response_key, keys.label_key, where)
    ),
    "steps": Format(UNSCORED_COLUMNS, lambda row, keys, where: read_steps(row, keys.steps_key, keys.labels_key, where)),
}
"""Prompts to be answered; responses to learn; pairs; single responses that are good or bad; labelled steps."""
