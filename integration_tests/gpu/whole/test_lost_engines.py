"""Engines on GPUs that are killed while they sample: other engines take their places, and no sample is lost."""

from __future__ import annotations

from collections.abc import Callable

from integration_tests.conftest import Recipe
from integration_tests.gpu.whole import NEEDS_CUDA, needs_two_gpus, start
from integration_tests.test_lost_engine import assert_stops

pytestmark = NEEDS_CUDA

ENDLESS = (
    "run.steps=100000",
    "run.checkpoint_every=100000",
    "run.export=false",
    "placement.max_restarts=0",
    "model.precision=bf16-mixed",
    "batch.prompts_per_step=16",
    "batch.samples_per_prompt=4",
    # Nearly all of a step is sampling.
    "sampling.max_tokens=200",
)


def lose_an_engine(recipe: Recipe, engines: int) -> None:
    """Kill an engine, wait until the run works with all engines again, and stop the run."""
    recipe.wait_for_step(3)
    recipe.kill_one("VLLMActor")

    def replaced() -> bool:
        rows = recipe.trained()
        return sum(row["rollout/engines_lost"] for row in rows) == 1 and rows[-1]["rollout/engines"] == engines

    recipe.wait_until(replaced, f"a step with {engines} engines after the loss of one")
    assert_stops(recipe, engines_lost=1)


def test_killed_engine_starts_again_on_the_gpu_of_the_worker(start_recipe: Callable[..., Recipe]) -> None:
    lose_an_engine(start(start_recipe, "one", *ENDLESS, "placement.num_workers=1"), engines=1)


@needs_two_gpus
def test_killed_engine_of_two_starts_again_on_the_same_gpu(start_recipe: Callable[..., Recipe]) -> None:
    lose_an_engine(start(start_recipe, "two", *ENDLESS, "placement.num_workers=2"), engines=2)


@needs_two_gpus
def test_killed_split_engine_gets_weights_over_nccl_again(start_recipe: Callable[..., Recipe]) -> None:
    options = ("placement.num_workers=1", "placement.rollout=split")
    lose_an_engine(start(start_recipe, "split", *ENDLESS, *options), engines=1)
