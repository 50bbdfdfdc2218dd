"""Reward functions for tests, with and without failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np


def is_right(solution_str: str, ground_truth: Any) -> float:
    return float(solution_str == ground_truth)


def length(solution_str: str) -> int:
    return len(solution_str)


def everything(**sample: Any) -> dict[str, Any]:
    return {"score": len(sample), "known": sample["extra_info"]["index"]}


def weighted(solution_str: str, weight: float, bonus: float = 0.0) -> float:
    return weight * len(solution_str) + bonus


def batch_lengths(solution_strs: list[str], extra_infos: list[dict[str, Any]]) -> list[int]:
    assert len(solution_strs) == len(extra_infos)
    return [len(solution) for solution in solution_strs]


def batch_size(solution_strs: list[str]) -> list[int]:
    return [len(solution_strs)] * len(solution_strs)


async def length_async(solution_str: str) -> float:
    await asyncio.sleep(0)
    return float(len(solution_str))


async def batch_lengths_async(solution_strs: list[str]) -> np.ndarray:
    await asyncio.sleep(0)
    return np.array([len(solution) for solution in solution_strs], dtype=np.float32)


async def num_event_loops(solution_str: str) -> int:
    """Return the number of event loops that have run this function in this process."""
    loop = asyncio.get_running_loop()
    if loop not in _EVENT_LOOPS:
        _EVENT_LOOPS.append(loop)
    return len(_EVENT_LOOPS)


_EVENT_LOOPS: list[asyncio.AbstractEventLoop] = []


class Meeting:
    """Score a response by its length. No call returns before the number of concurrent calls equals `parties`.

    After the meeting, longer responses are scored earlier.
    """

    def __init__(self, parties: int) -> None:
        self.parties, self.barrier = parties, asyncio.Barrier(parties)

    async def __call__(self, solution_str: str) -> float:
        await self.barrier.wait()
        for _ in range(self.parties - len(solution_str)):
            await asyncio.sleep(0)
        return float(len(solution_str))


def pass_time() -> None:
    """Move the clock of the running event loop past every present deadline of a coroutine."""
    loop: Any = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + 1e6


async def give_turns() -> None:
    """Let the event loop run all other coroutines, for more turns than any sample needs."""
    for _ in range(50):
        await asyncio.sleep(0)


async def length_past_every_deadline(solution_str: str) -> float:
    """Score a response by its length, after the deadline of the coroutine."""
    pass_time()
    await give_turns()
    return float(len(solution_str))


def hang_after_the_alarm() -> None:
    """Raise the signal of the soft deadline at once, and never return."""
    signal.raise_signal(signal.SIGALRM)
    while True:
        time.sleep(60)


class Remembering:
    """Object with an asynchronous __call__."""

    def __init__(self, offset: float) -> None:
        self.offset = offset

    async def __call__(self, solution_str: str) -> float:
        return self.offset + len(solution_str)


def swallow_and_hang() -> None:
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def deny() -> None:
    """Never return, and catch every exception."""
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def leave_an_orphan() -> None:
    """End this process, and leave a copy behind."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)


def grow() -> None:
    """Take memory without end."""
    blocks = []
    while True:
        blocks.append(bytearray(2**25))


def hang_deaf() -> None:
    """Sleep with the signal of the timer blocked, as in native code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)


def obey(solution_str: str) -> Any:
    """Run the action named by the response, or score the response by its length."""
    deeds: dict[str, Any] = {
        "raise": lambda: 1 / 0,
        "exit": lambda: sys.exit(3),
        "nan": lambda: float("nan"),
        "inf": lambda: {"score": 1.0, "detail": float("inf")},
        "huge": lambda: 10**5000,
        "text": lambda: "1.0",
        "none": lambda: None,
        "complex": lambda: 1j,
        "no score": lambda: {"reward": 1.0},
        "text detail": lambda: {"score": 1.0, "acc": True, "pred": "42", "note": None},
        "list detail": lambda: {"score": 1.0, "answer": ["42"]},
        "beyond float32": lambda: 1e39,
        "numpy": lambda: np.float32(0.5),
        "numpy bool": lambda: np.bool_(True),
        "0-d": lambda: {"score": np.array(2.0), "hits": np.int64(3)},
        "loop": lambda: all(True for _ in iter(int, 1)),
        "expire": hang_after_the_alarm,
        "swallow": swallow_and_hang,
        "deaf": hang_deaf,
        "die": lambda: os._exit(1),
        "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "torch": lambda: "torch" in sys.modules,
        "slow": lambda: time.sleep(0.3),
        "grow": grow,
        "end well": lambda: os._exit(0),
        "deny": deny,
        "bytes": lambda: b"1",
        "orphan": leave_an_orphan,
        "allocate": lambda: len([0] * 10**11),
        "fork": os.fork,
        "fork and end": lambda: os.fork() and 0,
    }
    done = deeds[solution_str]() if solution_str in deeds else len(solution_str)
    return 1.0 if solution_str == "slow" else done


async def obey_async(solution_str: str) -> Any:
    """Do the same as `obey`. `expire` blocks the event loop, and `await expire` and `stubborn` wait in the event loop.

    The callbacks of `callback` and `two callbacks` block the event loop, and the event loop swallows the alarm.
    """
    if solution_str == "await":
        await asyncio.sleep(600)
    if solution_str == "callback":
        asyncio.get_running_loop().call_soon(hang_after_the_alarm)
        await give_turns()
        pass_time()
        await asyncio.sleep(600)
    if solution_str == "two callbacks":
        for _ in range(2):
            asyncio.get_running_loop().call_soon(swallow_and_hang)
        await asyncio.sleep(600)
    if solution_str == "own timeout":
        raise TimeoutError("the server did not answer")
    if solution_str in ("await expire", "stubborn"):
        await give_turns()
        pass_time()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            if solution_str == "await expire":
                raise
            # The deadline of the loop ends a coroutine without reaction to the cancellation.
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            await asyncio.sleep(600)
    await asyncio.sleep(0)
    return obey(solution_str)


def obey_batch(solution_strs: list[str]) -> Any:
    for solution in solution_strs:
        if solution == "short":
            return [1.0]
        if solution == "scalar":
            return 1.0
        if solution == "generator":
            return (1.0 for _ in solution_strs)
    return [obey(solution) for solution in solution_strs]


def haggle(solution_str: str, messages: list[dict[str, str]], turns_left: int) -> object:
    """Reply until the response is `yes` or no turn is left."""
    if solution_str == "yes" or not turns_left:
        return {"score": float(solution_str == "yes"), "said": len(messages)}
    return "sure?" if solution_str == "no" else {"role": "tool", "content": solution_str.upper()}


def coach(solution_str: str, turns_left: int) -> object:
    """Reply with a reward of the turn until the response is `yes` or no turn is left."""
    if solution_str == "yes" or not turns_left:
        return 1.0
    rewards = {"no": 0.25, "nan": float("nan"), "text": "high"}
    return {"role": "user", "content": "sure?", "reward": rewards.get(solution_str, 0.5)}


def insists(solution_str: str) -> str:
    """Always reply, and never return a score."""
    return "again"


def mumbles(solution_str: str) -> object:
    """Reply with a number in place of text."""
    return {"role": "tool", "content": 4}


def talkative(solution_str: str, turns_left: int) -> object:
    """Continue the conversation after a response of odd length."""
    return "and?" if turns_left and len(solution_str) % 2 else 1.0 + len(solution_str)


def reward_tokens(solution_str: str, token_ids: list[int]) -> object:
    """Reward each token by its id, in the way named by the response."""
    rewards = [token / 8 for token in token_ids]
    returned: dict[str, object] = {
        "given": {"score": 1.5, "token_rewards": rewards, "length": len(rewards)},
        "array": {"token_rewards": np.array(rewards, dtype=np.float32)},
        "scalars": {"token_rewards": [np.float64(reward) for reward in rewards]},
        "none": {"score": 0.5, "token_rewards": None},
        "short": {"token_rewards": rewards[1:]},
        "nan": {"token_rewards": [*rewards[1:], float("nan")]},
        "huge": {"token_rewards": [*rewards[1:], 10**400]},
        "infinite": {"token_rewards": [1e308] * len(rewards)},
        "number": {"token_rewards": 1.0},
        "string": {"token_rewards": "1 2"},
        "words": {"token_rewards": ["1"] * len(rewards)},
        "reply": {"role": "user", "content": "more", "token_rewards": rewards},
    }
    return returned.get(solution_str, {"token_rewards": rewards})


def reward_tokens_of_batch(solution_strs: list[str], token_id_lists: list[list[int]]) -> list[object]:
    """Do the same as `reward_tokens` for a batch."""
    return [reward_tokens(solution, ids) for solution, ids in zip(solution_strs, token_id_lists, strict=True)]


def tally(solution_str: str, token_ids: list[int], turns_left: int) -> object:
    """Number the tokens of all turns after a `yes`. A reply to `no` has a reward of the turn."""
    if solution_str == "yes" or not turns_left:
        return {"token_rewards": range_of(token_ids)}
    return {"role": "user", "content": "sure?", "reward": 0.25 if solution_str == "no" else 0.0}


def range_of(items: Sequence[object]) -> list[float]:
    """Return 1, 2, ... for the items."""
    return [1.0 + place for place in range(len(items))]


def everything_per_token(**sample: Any) -> dict[str, Any]:
    """Number the characters of the response."""
    return {"token_rewards": range_of(sample["solution_str"])}


def die_on_bad(solution_str: str) -> float:
    """End this process for the answer "bad"."""
    if solution_str == "bad":
        os._exit(1)
    return 1.0
