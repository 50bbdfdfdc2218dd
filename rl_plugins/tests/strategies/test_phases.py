"""Phases: seconds add up, errors do not lose them, nesting is a bug."""

from __future__ import annotations

import time

import pytest

from rl_plugins.strategies.phases import PhaseLog


def test_measure_adds_up_seconds_of_a_phase_until_drain() -> None:
    log = PhaseLog()
    start = time.perf_counter()
    for _ in range(2):
        with log.measure("rollout"):
            assert log.current == "rollout"
            time.sleep(0.02)
    with log.measure("update"):
        time.sleep(0.01)
    elapsed = time.perf_counter() - start
    metrics = log.drain()
    assert set(metrics) == {"time/rollout", "time/update", "memory/rollout", "memory/update"}
    assert metrics["time/rollout"] >= 0.04 and metrics["time/update"] >= 0.01
    assert metrics["time/rollout"] + metrics["time/update"] <= elapsed
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
