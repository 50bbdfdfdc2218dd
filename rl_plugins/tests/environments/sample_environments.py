"""Stateful environments for tests, with and without failures."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plugins.environments.step_result import StepResult

MOVES = ["left", "down", "right", "up"]


def describe(observation: int) -> str:
    """Return a place of FrozenLake in words."""
    return f"row {observation // 4}, column {observation % 4}"


def read_move(text: str) -> int | None:
    """Return the action of FrozenLake for a word."""
    return MOVES.index(text) if text in MOVES else None


def read_guess(text: str) -> dict[str, str]:
    """Return the action of the guessing server: the last number of a text."""
    return {"message": re.findall(r"\d+", text)[-1]}


class Count:
    """Adds up the numbers of the policy. `0` ends the game with the sum as the score."""

    def __init__(self, first: int = 0) -> None:
        self.total = first

    async def reset(self, row: Mapping[str, Any]) -> list[Mapping[str, str]]:
        self.total += int(row["ground_truth"] or 0)
        return [*row["prompt"], {"role": "user", "content": str(self.total)}]

    async def step(self, message: Mapping[str, str]) -> Any:
        number = int(message["content"])
        if not number:
            return StepResult("bye", score=float(self.total), details={"last": number})
        self.total += number
        return StepResult(str(self.total), reward=number / 10)

    async def close(self) -> None:
        pass


class Obey(Count):
    """Does what an object must not do, by the text of the policy. `folder` gets a file for each closed object."""

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self.folder = folder

    async def reset(self, row: Mapping[str, Any]) -> Any:
        await self.step({"content": row["ground_truth"]})
        return "go"

    async def step(self, message: Mapping[str, str]) -> Any:
        act = message["content"]
        if act == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if act == "exit":
            os._exit(3)
        if act == "raise":
            raise ValueError("no such\nact")
        if act == "cancel":
            raise asyncio.CancelledError
        if act == "wait":
            await asyncio.sleep(1e6)
        if act == "block":
            time.sleep(1e6)
        if act == "eat":
            return str(len(bytearray(2**31)))
        if act == "program":
            return str(subprocess.Popen(["sleep", "1000000"], start_new_session=True).pid)
        values: dict[str, Any] = {
            "nothing": None,
            "empty": [],
            "nan": float("nan"),
            "text": {"score": "high"},
            "half": {"role": "user"},
            "object": [{"role": "user", "content": "x", "by": {1}}],
            "reward": StepResult("x", reward=float("inf")),
            "random": str(random.random()),
            "end": 0.5,
        }
        return values.get(act, "ok")

    async def close(self) -> None:
        if self.folder:
            (Path(self.folder) / str(os.getpid())).touch()
        if "broken" in self.folder:
            raise OSError("not closed")


class Judge:
    """Talks on, and scores at the end only."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        self.heard: list[str] = []
        return "talk"

    async def step(self, message: Mapping[str, str]) -> str:
        self.heard.append(message["content"])
        return "and?"

    async def score(self) -> float:
        return float(len(self.heard))

    async def close(self) -> None:
        pass


class Points(Judge):
    """Keeps its points in an attribute with the name of a method."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        self.score = 0  # type: ignore[assignment, method-assign]
        return await super().reset(row)


class PlainScore(Judge):
    """Has a score that is not async."""

    def score(self) -> float:  # type: ignore[override]
        return 1.0


class Endless(Judge):
    """Never returns a reward."""

    score = None  # type: ignore[assignment]


class Delegates(Endless):
    """Has the score of another object."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        async def score() -> float:
            return 1.0

        self.score = score  # type: ignore[assignment]
        return await super().reset(row)


class Tokens(Endless):
    """Talks on after `a`, and then numbers the tokens of all responses, with the fault of its argument."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.ids = fault, list[int]()

    async def step(self, message: Mapping[str, Any]) -> Any:
        self.ids += message["token_ids"]
        if message["content"] == "a":
            return StepResult("and?", reward=0.5 if self.fault == "earlier" else None)
        rewards = [1.0 + place for place in range(len(self.ids) - (self.fault == "short"))]
        if self.fault == "score":
            return StepResult("bye", score=1.0, token_rewards=rewards)
        return StepResult(
            token_rewards=rewards, reward=0.5 if self.fault == "same" else None, details={"n": len(rewards)}
        )


class Lengths(Endless):
    """Rewards each turn by the length of the response."""

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return [*row["prompt"], {"role": "user", "content": str(row["seed"] % 10)}]

    async def step(self, message: Mapping[str, str]) -> Any:
        return StepResult("more", reward=1.0 + len(message["content"]))


class Even(Lengths):
    """Fails to begin with an odd right answer."""

    async def reset(self, row: Mapping[str, Any]) -> Any:
        if int(row["ground_truth"]) % 2:
            raise ValueError("odd")
        return await super().reset(row)


class WithoutClose:
    async def reset(self, row: Mapping[str, Any]) -> str:
        return ""

    async def step(self, message: Mapping[str, str]) -> float:
        return 0.0


class PlainStep(Count):
    def step(self, message: Mapping[str, str]) -> float:  # type: ignore[override]
        return 0.0


class OtherArguments(Count):
    async def step(self, message: Mapping[str, str], more: int) -> float:  # type: ignore[override]
        return 0.0


class NeedsSize(Count):
    def __init__(self, size: int) -> None:
        super().__init__(size)
