"""Phases: the seconds of all phases add up, also of a phase with an error; nested phases are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rl_plugins.strategies import phase_log
from rl_plugins.strategies.phase_log import PhaseLog


def test_measure_adds_up_seconds_of_a_phase_until_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(phase_log, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    log = PhaseLog()
    for seconds in (2.0, 3.0):
        with log.measure("rollout"):
            assert log.current == "rollout"
            clock.now += seconds
        clock.now += 50.0
    with log.measure("update"):
        clock.now += 7.0
    assert log.seconds("rollout") == 5.0 and log.seconds("reload") == 0.0
    metrics = log.drain()
    assert set(metrics) == {"time/rollout", "time/update", "memory/rollout", "memory/update"}
    assert (metrics["time/rollout"], metrics["time/update"]) == (5.0, 7.0)
    # The resident size of this process, in GiB.
    assert 0.01 < metrics["memory/rollout"] < 1000
    assert log.drain() == {}


def test_measure_records_and_ends_a_phase_that_raises() -> None:
    log = PhaseLog()
    with pytest.raises(RuntimeError, match="no luck"), log.measure("rollout"):
        raise RuntimeError("no luck")
    assert log.current is None
    assert "time/rollout" in log.drain()


def test_measure_refuses_nested_phases() -> None:
    log = PhaseLog()
    with pytest.raises(AssertionError, match="phase 'inner' began inside 'outer'"), log.measure("outer"):
        log.measure("inner").__enter__()
