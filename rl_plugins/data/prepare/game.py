"""Games with a hidden number in a range, and guesses of a player who chooses at random among the numbers left."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from rl_plugins.data.parquet import prompt_row
from rl_plugins.data.prepare.files import RowList
from rl_plugins.data.prepare.splits import choose_splits

SIZES = {"train": 768, "dev": 64, "test": 192}
"""Rows of each split."""
LOWEST, HIGHEST = 10, 99
"""All numbers have two digits, so all guesses have the same number of tokens."""
WIDTHS = range(16, 32)
"""Numbers in a range. Five good guesses find any number in a range of 31."""
MAX_GUESSES = 6


def game_splits(sizes: Mapping[str, int], seed: int) -> dict[str, RowList]:
    """Return games as prompts, and the split `sft` with guesses. A prompt is `23-53`, its answer the hidden number.

    Args:
        sizes: number of rows of `train`, `dev` and `test`.
        seed: seed of the choice.

    Returns:
        The rows of each split. No range comes twice in `train`, `dev` and `test`.

    Raises:
        ConfigError: a number is below 1, or there are fewer ranges than rows.
    """
    ranges = [(low, low + width - 1) for width in WIDTHS for low in range(LOWEST, HIGHEST - width + 2)]
    rng = random.Random(seed)
    chosen = choose_splits(ranges, rng, sizes)
    splits = {
        split: [_row(low, high, rng.randint(low, high)) for low, high in chosen_ranges]
        for split, chosen_ranges in chosen.items()
    }
    return {**splits, "sft": guess_rows(splits["train"], rng)}


def guess_rows(rows: RowList, rng: random.Random) -> RowList:
    """Return a row for SFT for each guess of a player: the conversation so far, and the guess.

    The player guesses at random among the numbers left. So SFT teaches the rules, and leaves the strategy to RL.

    Args:
        rows: games.
        rng: source of the guesses.
    """
    taught = []
    for row in rows:
        low, high, messages = row["extra_info"]["low"], row["extra_info"]["high"], row["prompt"]
        number = row["reward_model"]["ground_truth"]
        for _ in range(MAX_GUESSES):
            guess = rng.randint(low, high)
            taught.append({**row, "prompt": messages, "extra_info": {"response": str(guess)}})
            if guess == int(number):
                break
            low, high = remaining_range(low, high, guess, int(number))
            answer = {"role": "user", "content": range_text(low, high)}
            messages = [*messages, {"role": "assistant", "content": str(guess)}, answer]
    return taught


def remaining_range(low: int, high: int, guess: int, number: int) -> tuple[int, int]:
    """Return the first and the last of the numbers left after a wrong guess.

    Args:
        low: smallest number before the guess.
        high: largest number before the guess.
        guess: wrong guess, which may be outside the range.
        number: hidden number.
    """
    return (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))


def range_text(low: int, high: int) -> str:
    """Return the text of a message with the first and the last of the numbers left, such as `23-53`."""
    return f"{low}-{high}"


def _row(low: int, high: int, number: int) -> dict[str, Any]:
    text = range_text(low, high)
    return prompt_row(text, str(number), data_source="guess_number", ability="game", low=low, high=high)
