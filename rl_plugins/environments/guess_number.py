"""A game of several turns, in which the policy guesses a hidden number. `rl-plugins prepare game` makes the rows.

environment=stateful environment.stateful=rl_plugins.environments.guess_number.GuessNumber
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_plugins.data.prepare.game import range_text, remaining_range
from rl_plugins.environments.step_result import StepResult
from rl_plugins.rewards.records import Message

# `str.isdigit` is also true for digits that `int` refuses, and a number of many digits takes long.
_NUMBER = re.compile(r"[0-9]{1,9}")


class GuessNumber:
    """Stateful environment: the policy guesses a hidden number, and reads the range of the numbers left.

    The number is the row's ground truth, and its range is `low` and `high` of the row's `extra_info`. The right guess
    has the score 1. Each other response costs a reward.

    Args:
        cost: cost of a response without the number.
        lost: score of a game without the right guess.
    """

    def __init__(self, cost: float = 0.1, lost: float = -1.0) -> None:
        self._cost, self._lost = cost, lost
        self._low = self._high = self._number = self._guesses = 0

    async def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Start a game; return the row's prompt."""
        self._number, self._guesses = int(row["ground_truth"]), 0
        self._low, self._high = int(row["extra_info"]["low"]), int(row["extra_info"]["high"])
        return list(row["prompt"])

    async def step(self, message: Message) -> StepResult | dict[str, float]:
        """Compare a guess with the number."""
        self._guesses += 1
        text = str(message["content"]).strip()
        if _NUMBER.fullmatch(text):
            if int(text) == self._number:
                return {"score": 1.0, "won": 1.0, "guesses": self._guesses}
            self._low, self._high = remaining_range(self._low, self._high, int(text), self._number)
        return StepResult(range_text(self._low, self._high), reward=-self._cost)

    async def score(self) -> dict[str, float]:
        """Return the score of a lost game."""
        return {"score": self._lost, "won": 0.0, "guesses": self._guesses}

    async def close(self) -> None:
        """Release nothing: a game holds no resources."""
