"""OfflineVLLM: an engine that does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")

from rl_plugins.errors import DeadlineExceeded
from rl_plugins.rollout.vllm import actor
from rl_plugins.rollout.vllm.config import VLLMConfig
from rl_plugins.rollout.vllm.offline import OfflineVLLM
from rl_plugins.tests.patience import patient


class SilentEngine:
    """Begins a session, and answers no further call."""

    def __init__(self, config: VLLMConfig, *, ends_by_kill: bool) -> None:
        self.ended: list[str] = []

    async def ready(self) -> None:
        """Answer at once."""

    async def begin_session(self) -> None:
        """Answer at once."""

    async def drop(self, rank: int, tickets: list[int]) -> None:
        """Wait for an event that never comes."""
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append("drop")


def test_call_without_an_answer_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "VLLMActor", SilentEngine)
    engine: Any = OfflineVLLM(VLLMConfig("model", generate_timeout_s=60))
    with pytest.raises(DeadlineExceeded, match=r"has not answered drop within"), monkeypatch.context() as short:
        short.setattr(engine, "_timeout_s", patient(1))
        engine.drop([1])
    # The engine ends the call.
    engine._run(asyncio.sleep(0))
    assert engine._engine.ended == ["drop"]
