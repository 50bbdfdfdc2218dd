"""Answers of a language model as judge: the score in an answer, and a folder with the answers so far."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_plugins.errors import StorageError
from rl_plugins.whole_file import write_whole_text

logger = logging.getLogger(__name__)

# `Score: 7`, `**Score (0-10):** 7/10`, `"score" = 7`, `The score is 7.`
_LINE = re.compile(
    r"""score["'*_\s]*(?:\([^()\n]*\))?["'*_\s]*(?:[:=]|\bis\b)["'*_\s]*([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)""",
    re.IGNORECASE,
)
_MAX_OBJECTS = 1000


@dataclass(frozen=True)
class JudgeAnswer:
    """Text of an answer, and its size.

    Attributes:
        text: text of the message.
        tokens_in: tokens of the question.
        tokens_out: tokens of the answer.
        was_cut: True if the answer was longer than allowed.
    """

    text: str
    tokens_in: int = 0
    tokens_out: int = 0
    was_cut: bool = False


def read_score(text: str, *, was_cut: bool = False) -> float | None:
    """Return the score in an answer, or None.

    The score is the number `score` of the last JSON object with this key, not of an object inside an object. Without
    such an object, the score is the last number after the word "score", as in `Score: 7`.

    Args:
        text: text of the answer.
        was_cut: True if the answer was longer than allowed. Its score must be in an object, and no object may be cut.
    """
    decoder, score, end = json.JSONDecoder(), None, 0
    starts = [position for position, character in enumerate(text) if character == "{"]
    for start in starts[-_MAX_OBJECTS:]:
        if start < end:
            continue
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            if was_cut:
                return None
            continue
        found = _number(value.get("score"))
        score = score if found is None else found
    if score is not None or was_cut:
        return score
    numbers = _LINE.findall(text)
    return float(numbers[-1]) if numbers else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


class AnswerFolder:
    """Folder with answers, one file for each question and vote. Many processes may use the folder at the same time.

    Args:
        folder: the folder; None keeps nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._failed = False

    def read(self, question: Mapping[str, Any]) -> JudgeAnswer | None:
        """Return the answer to a question; None if there is none, or its file is damaged.

        Args:
            question: everything that an answer depends on, as plain values.
        """
        if self._folder is None:
            return None
        try:
            return JudgeAnswer(**json.loads(self._file(self._folder, question).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, question: Mapping[str, Any], answer: JudgeAnswer) -> None:
        """Keep an answer. A full disk is logged once, and stops no run."""
        if self._folder is None:
            return
        try:
            write_whole_text(self._file(self._folder, question), json.dumps(asdict(answer)))
        except StorageError as error:
            if not self._failed:
                logger.warning("The answers of the judge are not kept: %s", error)
            self._failed = True

    @staticmethod
    def _file(folder: Path, question: Mapping[str, Any]) -> Path:
        name = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return folder / name[:2] / f"{name}.json"
