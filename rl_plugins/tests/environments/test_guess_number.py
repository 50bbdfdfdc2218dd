"""GuessNumber: ranges, rewards and scores of a game; and the guesses that SFT learns from."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl_plugins.data.prepare.game import HIGHEST, LOWEST, MAX_GUESSES, WIDTHS, game_splits
from rl_plugins.environments.guess_number import GuessNumber
from rl_plugins.environments.step_result import Answer, read_step
from rl_plugins.tests.cases import case

SIZES = {"train": 40, "dev": 5, "test": 9}


def started(row: dict[str, Any], **options: float) -> GuessNumber:
    """Return a game of a row that a run has read from a file."""
    game = GuessNumber(**options)
    shown = asyncio.run(game.reset({**row, "ground_truth": row["reward_model"]["ground_truth"]}))
    assert shown == row["prompt"]
    return game


def answered(game: GuessNumber, text: str) -> Answer:
    return read_step(asyncio.run(game.step({"role": "assistant", "content": text})), "game")


def row_of(low: int, high: int, number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"{low}-{high}"}]
    extra = {"low": low, "high": high}
    return {"prompt": prompt, "reward_model": {"ground_truth": str(number)}, "extra_info": extra}


def test_step_answers_with_the_numbers_left_and_ends_with_the_right_guess() -> None:
    game = started(row_of(23, 53, 41))
    for text, left in {"38": "39-53", " 45\n": "39-44", "12": "39-44", "99": "39-44", "40": "41-44"}.items():
        with case(text):
            answer = answered(game, text)
            assert (answer.messages, answer.reward, answer.score) == ([{"role": "user", "content": left}], -0.1, None)
    assert answered(game, "41") == Answer(score=1.0, details={"won": 1.0, "guesses": 6})
    asyncio.run(game.close())


def test_step_answers_a_text_that_is_no_number_with_the_same_range() -> None:
    game = started(row_of(23, 53, 41), cost=0.25)
    for text in ("", "about 41", "4 1", "²", "٤١", "9" * 5000, "-41", "41.0"):
        with case(text):
            answer = answered(game, text)
            assert (answer.messages[0]["content"], answer.reward) == ("23-53", -0.25)


def test_score_of_a_lost_game() -> None:
    game = started(row_of(23, 53, 41), lost=-2.0)
    answered(game, "30")
    assert asyncio.run(game.score()) == {"score": -2.0, "won": 0.0, "guesses": 1}


def test_game_splits_have_different_ranges_of_two_digits() -> None:
    splits = game_splits(SIZES, seed=0)
    games = [row for split in ("train", "dev", "test") for row in splits[split]]
    assert [len(splits[split]) for split in ("train", "dev", "test")] == [40, 5, 9]
    assert len({row["prompt"][0]["content"] for row in games}) == 54
    for row in games:
        low, high = row["extra_info"]["low"], row["extra_info"]["high"]
        assert row["prompt"] == [{"role": "user", "content": f"{low}-{high}"}]
        assert LOWEST <= low <= int(row["reward_model"]["ground_truth"]) <= high <= HIGHEST
        assert high - low + 1 in WIDTHS
    assert splits == game_splits(SIZES, seed=0) and splits != game_splits(SIZES, seed=1)


def test_guess_rows_are_turns_of_games_with_guesses_in_the_range() -> None:
    splits = game_splits(SIZES, seed=0)
    games = {row["prompt"][0]["content"]: row for row in splits["train"]}
    lengths, won = [], 0
    for row in splits["sft"]:
        first, *turns = row["prompt"]
        game = started(games[first["content"]])
        left = first["content"]
        for guess, reply in zip(turns[::2], turns[1::2], strict=True):
            (message,) = answered(game, guess["content"]).messages
            assert message == reply
            left = message["content"]
        low, high = map(int, left.split("-"))
        assert low <= int(row["extra_info"]["response"]) <= high
        won += answered(game, row["extra_info"]["response"]).score is not None
        lengths.append(1 + len(turns) // 2)
    assert max(lengths) == MAX_GUESSES and lengths.count(1) == 40 and 20 < won <= 40


@pytest.mark.parametrize("width", [WIDTHS[0], WIDTHS[-1]])
def test_five_guesses_in_the_middle_find_every_number(width: int) -> None:
    for number in range(LOWEST, LOWEST + width):
        game, left = started(row_of(LOWEST, LOWEST + width - 1, number)), f"{LOWEST}-{LOWEST + width - 1}"
        for _ in range(5):
            answer = answered(game, str(sum(map(int, left.split("-"))) // 2))
            if answer.score is not None:
                break
            left = answer.messages[0]["content"]
        assert answer.score == 1.0
