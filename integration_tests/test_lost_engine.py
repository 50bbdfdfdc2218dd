"""A run that samples ahead loses engines, which die or hang: another engine does the work until Ray replaces them.

`test_colocated_layout` loses an engine of a run without a schedule.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import groupby

import pytest

from integration_tests.conftest import Recipe
from rl_plugins.tests.patience import patient

pytestmark = pytest.mark.extended

COMMON = (
    "run.steps=100000",
    "run.eval_every=0",
    "run.checkpoint_every=100000",
    "run.export=false",
    "batch.prompts_per_step=8",
    "batch.samples_per_prompt=4",
    "rollout.engines=2",
    "rollout.check_updates=1",
    "rollout.transport=gloo",
    f"rollout.stall_timeout_s={patient(10)}",
    "schedule.max_staleness=1",
    "placement.max_restarts=0",
    "tracking.enabled=false",
)


def wait_for_engine_counts(run: Recipe, *counts: int) -> None:
    """Wait until the number of engines of the steps so far has changed in this way."""

    def seen() -> list[float]:
        return [count for count, _ in groupby(row["rollout/engines"] for row in run.trained())]

    run.wait_until(lambda: seen() == list(counts), f"steps with {counts} engines")


def assert_stops(run: Recipe, *, engines_lost: int) -> None:
    """Check that the run ended on request, took each step once, and lost no sample."""
    (run.run / "stop").touch()
    assert run.wait() == 75, run.tail()
    rows = run.trained()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["train/reward_died"] == 0 for row in rows)
    assert sum(row["rollout/engines_lost"] for row in rows) == engines_lost


def test_killed_engine_and_then_hung_engine_are_replaced_while_the_other_works(
    start_recipe: Callable[..., Recipe],
) -> None:
    """An engine hangs if it sends nothing for `stall_timeout_s`; a working engine is never silent for so long."""
    run = start_recipe("grpo", "lost", *COMMON)
    run.wait_for_step(3)
    run.processes("VLLMActor")[0].kill()
    # The other engine gets all the work of the steps at once, until the lost engine is back.
    wait_for_engine_counts(run, 2, 1, 2)
    run.processes("VLLMActor")[0].send_signal(signal.SIGSTOP)
    wait_for_engine_counts(run, 2, 1, 2, 1, 2)
    assert_stops(run, engines_lost=2)
