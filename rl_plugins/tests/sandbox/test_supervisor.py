"""Supervision of a program: counting begins when the reaper is ready."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from rl_plugins.sandbox import supervisor
from rl_plugins.sandbox.records import SandboxJob, SandboxLimits
from rl_plugins.sandbox.supervisor import Pipes, Supervision, Usage
from rl_plugins.tests.loops import for_each


@for_each(("report", "limit"), [(b"", ""), (b"\n", "cpu")])
def test_supervision_counts_nothing_before_the_report_of_the_reaper(
    report: bytes, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SandboxJob("", "", SandboxLimits(), None, "main.py").plain()["limits"]
    pipes, times, reaper = Pipes.new(), iter(range(10**6)), ExitStack()
    reaper.callback(pipes.close_program_ends)

    def monotonic() -> float:
        """Return the time in seconds from 0. The reaper ends at 4 s."""
        if (now := next(times)) == 4:
            reaper.close()
        return float(now)

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(supervisor, "usage_of", lambda reaper: Usage(1000.0, 0, 1, []))
    os.write(pipes.status[1], report)
    caller, channel = socket.socketpair()
    with caller, channel:
        outcome = Supervision(pipes, 1, limits, b"", channel.fileno()).run(reaper.close)
    assert outcome is not None and outcome.answer["limit"] == limit
    for supervisor_end, _ in (pipes.stdout, pipes.stderr, pipes.status):
        os.close(supervisor_end)
