"""OpenEnvText: conversations with a server that the package openenv runs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv")

from rl_plugins.environments.openenv_text import OpenEnvText
from rl_plugins.environments.step_result import StepResult
from rl_plugins.tests.environments.openenv_conversation import ROW, play

PROGRAM = Path(__file__).with_name("openenv_package_server.py")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Address of a server with two sessions at once."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stdin is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.stdin.close()


def test_conversation_has_the_observations_and_rewards_of_the_package(url: str) -> None:
    environment = OpenEnvText(url, reset=["low"])
    (first,), *results = asyncio.run(play(environment, "5", "9", "7"))
    assert first["content"] == "Find the number.\n\nguess from 2"
    assert results == [
        StepResult("higher", reward=-0.1), StepResult("lower", reward=-0.1), StepResult("right", score=1.0),
    ]  # fmt: skip


def test_refused_action_and_failed_step_name_the_reason_of_the_package(url: str) -> None:
    refused = r"refused step with \{'words': '5'\}: Invalid message \(VALIDATION_ERROR\): .*Field required"
    with pytest.raises(RuntimeError, match=refused):
        asyncio.run(play(OpenEnvText(url, action="words"), "5"))
    with pytest.raises(RuntimeError, match=r"invalid literal for int.* \(EXECUTION_ERROR\)"):
        asyncio.run(play(OpenEnvText(url), "five"))


def test_session_beyond_the_capacity_names_the_reason_of_the_package(url: str) -> None:
    async def play_at_once() -> list[Any]:
        environments = [OpenEnvText(url) for _ in range(3)]
        results = [await environment.reset(ROW) for environment in environments[:2]]
        try:
            with pytest.raises(RuntimeError, match=r"refused reset with .* \(CAPACITY_REACHED\)"):
                await environments[2].reset(ROW)
        finally:
            for environment in environments:
                await environment.close()
        # The sessions have ended, so there is room.
        return [*results, *await asyncio.gather(*(play(OpenEnvText(url), "7") for _ in range(2)))]

    results = asyncio.run(play_at_once())
    assert len(results) == 4 and results[-1][-1] == StepResult("right", score=1.0)
