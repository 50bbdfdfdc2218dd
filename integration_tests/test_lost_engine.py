"""A rollout engine dies or hangs in the middle of a run: other engines do the work, and Ray replaces the engine."""

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
    """The layout of a machine with four GPUs: each engine has two processes, on the devices of two workers.

    An engine hangs if it sends nothing for `stall_timeout_s`; a working engine is never silent for so long.
    """
    layout = ("placement.num_workers=4", "placement.cpus_per_worker=0.5", "rollout.tensor_parallel_size=2")
    run = start_recipe("grpo", "lost", *COMMON, *layout, f"rollout.stall_timeout_s={patient(20)}")
    run.wait_for_step(2)
    run.processes("VLLMActor")[0].kill()
    # The other engine gets all the work of the steps at once, until the lost engine is back.
    wait_for_engine_counts(run, 2, 1, 2)
    run.processes("VLLMActor")[0].send_signal(signal.SIGSTOP)
    wait_for_engine_counts(run, 2, 1, 2, 1, 2)
    assert_stops(run, engines_lost=2)


def test_killed_engine_is_replaced_in_a_run_that_samples_ahead_and_updates_over_gloo(
    start_recipe: Callable[..., Recipe],
) -> None:
    ahead = ("schedule.max_staleness=1", "rollout.transport=gloo", "placement.num_workers=1")
    run = start_recipe("grpo", "ahead", *COMMON, *ahead)
    run.wait_for_step(3)
    run.processes("VLLMActor")[0].kill()
    wait_for_engine_counts(run, 2, 1, 2)
    assert_stops(run, engines_lost=1)
