"""Tools for tests, with and without failures, and a parser of calls."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from rl_plugins.environments.tool_functions import ToolResult

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MEETING = threading.Barrier(3)


def read_calls(text: str) -> list[Any]:
    """Calls in the form of Hermes."""
    return [json.loads(call) for call in _CALL.findall(text)]


ACTS = [*["nothing", "mapping", "object", "long", "raise"] * 12, "exit", "exit", "hang", "die"]


def read_any_act(text: str) -> list[dict[str, Any]]:
    """Call of `obey` in any response: ACTS has the share of each act, and equal responses have the same act."""
    return [{"name": "obey", "arguments": {"act": ACTS[zlib.crc32(text.encode()) % len(ACTS)]}}]


def add_to_every_response(text: str) -> list[dict[str, Any]]:
    """Two calls of `add` in any response, for a policy that knows no tools."""
    return [{"name": "add", "arguments": {"a": len(text), "b": place}} for place in range(2)]


def add(a: int, b: int) -> int:
    """Add numbers.

    Args:
        a: first number.
        b: second number.
    """
    return a + b


async def wait_long(seconds: float) -> str:
    """Wait.

    Args:
        seconds: time.
    """
    await asyncio.sleep(seconds)
    return "waited"


def meet() -> str:
    """Wait until three calls run at once."""
    MEETING.wait()
    return "met"


def obey(act: str) -> Any:
    """Do something that a tool must not do.

    Args:
        act: name of the act.
    """
    if act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "exit":
        raise SystemExit(3)
    if act == "hang":
        time.sleep(1e6)
    if act == "raise":
        raise ValueError("no such\nact")
    plain = {"nothing": None, "mapping": {"a": [1]}, "object": {1}, "long": "x" * 10_000_000}
    return {**plain, "verl": ("4", 0.5, {}), "three": ("4", 0.5, 1), "two": ("4", {})}[act]


async def cancel(act: str) -> None:
    """End by a cancellation of the tool's own.

    Args:
        act: name of the act.
    """
    if act == "raise":
        raise asyncio.CancelledError("by the tool")
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1e6)


def cancel_in_thread() -> None:
    """End by a cancellation in a thread."""
    raise CancelledError


async def block() -> str:
    """Block the event loop."""
    time.sleep(1e6)
    return ""


def refuse() -> None:
    """Raise an error."""
    raise ValueError("no")


def guess(number: float) -> ToolResult:
    """Guess a number.

    Args:
        number: the number, which is also the reward.
    """
    return ToolResult("wrong", reward=number if number < 1e6 else float("inf"))


class Shop:
    """A class with a state."""

    name = "price"

    def __init__(self, prices: Mapping[str, int]) -> None:
        self.prices = prices

    def __call__(self, item: str) -> int:
        """Return a price.

        Args:
            item: name.
        """
        return self.prices[item]


class Single:
    """Calls that run one at a time."""

    name = "nap"
    calls_at_once = 1

    def __call__(self, seconds: float) -> str:
        """Sleep.

        Args:
            seconds: time.
        """
        time.sleep(seconds)
        return "slept"


class Crowd:
    """Calls that all run at once."""

    name = "gather"

    def __init__(self, size: int) -> None:
        self.here: list[int] = []
        self.barrier = threading.Barrier(size)

    def __call__(self) -> int:
        """Wait until all calls run, and return the number of calls."""
        self.here.append(1)
        self.barrier.wait()
        return len(self.here)


class Program:
    """A program that runs until somebody ends it, in a group of its own."""

    name = "program"

    def __init__(self) -> None:
        self.program = subprocess.Popen(["sleep", "1000000"], start_new_session=True)

    def __call__(self) -> int:
        """Return the number of the program."""
        return self.program.pid


def untyped(a, b):
    """Do nothing.

    Args:
        a: first.
        b: second.
    """


def silent(a: int) -> int:
    return a
