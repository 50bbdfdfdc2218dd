"""Supervision of a program: the begin of counting, and descriptors."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from rl_plugins.sandbox import supervisor
from rl_plugins.sandbox.records import SandboxJob, SandboxLimits
from rl_plugins.sandbox.supervisor import Pipes, Supervision, Usage, highest_descriptor
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


def test_become_standard_closes_open_descriptors_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, pipes = list[tuple[int, int]](), Pipes.new()
    with monkeypatch.context() as patch:
        patch.setattr(supervisor.os, "dup2", lambda *numbers: None)
        patch.setattr(supervisor.os, "closerange", lambda first, end: ranges.append((first, end)))
        pipes.become_standard()
    assert ranges == [(3, pipes.status[1]), (pipes.status[1] + 1, highest_descriptor() + 1)]
    pipes.close_program_ends()
    pipes.close_supervisor_ends()
