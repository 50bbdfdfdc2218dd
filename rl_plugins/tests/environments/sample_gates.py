"""A tool, an environment and an agent that wait for the rollout engine of a test, by files in a folder.

A response that begins with `w` waits until the engine has new weights. Any other response ends the conversation.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plugins.environments.step_result import StepResult
from rl_plugins.environments.tool_functions import ToolResult

ASKED, UPDATED = "asked", "updated"
"""Files: the engine has sampled a first response that waits, and the engine has new weights."""


async def exists(folder: str, name: str) -> None:
    """Wait for a file."""
    while not (Path(folder) / name).exists():
        await asyncio.sleep(0.01)


def last_number(solution_str: str) -> float:
    """Return the last number of a text."""
    return float(re.findall(r"\d+", solution_str)[-1])


def read_wait(text: str) -> list[dict[str, Any]]:
    """Parser of the call of `WaitForWeights`."""
    return [{"name": "wait_for_weights", "arguments": {}}] if text.startswith("w") else []


class WaitForWeights:
    """The tool."""

    name = "wait_for_weights"

    def __init__(self, folder: str) -> None:
        self.folder = folder

    async def __call__(self) -> ToolResult:
        """Wait for new weights."""
        await exists(self.folder, UPDATED)
        return ToolResult("go", reward=0.5)


class Waiting:
    """The environment."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return row["prompt"]

    async def step(self, message: Mapping[str, str]) -> Any:
        if message["content"].startswith("w"):
            await exists(self.folder, UPDATED)
            return StepResult("go", reward=0.5)
        await exists(self.folder, ASKED)
        return last_number(message["content"])

    async def close(self) -> None:
        pass


async def ask(row: Mapping[str, Any], base_url: str, api_key: str, *, folder: str) -> float:
    """The agent."""
    # The library openai is installed with vLLM.
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [*row["prompt"]]
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            text = answer.choices[0].message.content or ""
            if not text.startswith("w"):
                await exists(folder, ASKED)
                return last_number(text)
            await exists(folder, UPDATED)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "go"}]
