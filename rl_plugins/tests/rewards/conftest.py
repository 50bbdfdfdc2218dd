"""A judge's server for tests, and retries without delay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl_plugins.rewards import judge_server
from rl_plugins.tests.rewards.judge_stub import JudgeStub, judge_stub


@pytest.fixture
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat a failed question at once, on this machine."""
    monkeypatch.setattr(judge_server, "FIRST_DELAY_S", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def stub(short_delays: None) -> Iterator[JudgeStub]:
    """Server of a judge on this machine."""
    with judge_stub() as server:
        yield server
