"""An engine that is killed or hangs in the middle of a run: the others do its work, and it comes back."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from itertools import groupby

import psutil
import pytest

from integration_tests.conftest import Recipe

pytestmark = pytest.mark.extended

COMMON = (
    "run.eval_every=0",
    "run.checkpoint_every=1000",
    "run.export=false",
    "batch.prompts_per_step=8",
    "batch.samples_per_prompt=4",
    "rollout.check_updates=1",
    "placement.max_restarts=0",
    "tracking.enabled=false",
)


def engines(recipe: Recipe) -> list[psutil.Process]:
    return [one for one in recipe.processes() if "VLLMActor" in " ".join(one.cmdline())]


def trained(recipe: Recipe) -> list[dict[str, float]]:
    return [row for row in recipe.metrics() if "train/loss" in row]


def finished(recipe: Recipe, status: int = 0) -> dict[int, dict[str, float]]:
    """Each step's metrics; every step was taken once."""
    assert recipe.wait() == status, recipe.tail()
    rows = trained(recipe)
    steps = [int(row["step"]) for row in rows]
    assert steps == list(range(1, len(steps) + 1))
    assert all(row["train/reward_died"] == 0 for row in rows)
    return dict(zip(steps, rows, strict=True))


@pytest.mark.parametrize(
    "options",
    [(), ("schedule.max_staleness=1",), ("rollout.transport=gloo",)],
    ids=["synchronous", "ahead", "gloo"],
)
def test_a_killed_engine_is_replaced_while_the_other_works(
    start_recipe: Callable[..., Recipe], options: tuple[str, ...]
) -> None:
    run = start_recipe("grpo", "killed", "run.steps=100000", "rollout.engines=2", *COMMON, *options)
    run.wait_for_step(10)
    engines(run)[0].kill()
    # The other one has the work of the steps to itself at once, and not for ever.
    deadline = time.monotonic() + 240
    while [count for count, _ in groupby(row["rollout/engines"] for row in trained(run))] != [2, 1, 2]:
        assert run.process.poll() is None and time.monotonic() < deadline, run.tail()
        time.sleep(0.5)
    (run.run / "stop").touch()
    steps = finished(run, status=75)
    assert sum(row["rollout/engines_lost"] for row in steps.values()) == 1


def test_a_hung_engine_is_found_by_its_deadline(start_recipe: Callable[..., Recipe]) -> None:
    run = start_recipe("grpo", "hung", "run.steps=8", "rollout.stall_timeout_s=4", *COMMON)
    run.wait_for_step(3)
    engines(run)[0].send_signal(signal.SIGSTOP)
    steps = finished(run)
    assert len(steps) == 8
    assert sum(row["rollout/engines_lost"] for row in steps.values()) == 1
