"""The host waits for a GPU at most once in a forward pass, so the GPU always has work in its queue."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned, canned_answers, canned_labels, canned_preferences
from rl_plugins.tests.stages.fake_gpu import training_on_fake_gpu
from rl_plugins.vision_language import ModelInputs


def waits_and_passes(train: Callable[..., Any], tokens: int) -> tuple[int, int]:
    """Return how often the host waits for the GPU in a step, and the number of forward passes."""
    run, passes = ModelInputs.run, list[str]()

    def counted(inputs: ModelInputs, model: Any, **options: Any) -> Any:
        passes.append(type(model).__name__)
        return run(inputs, model, **options)

    with training_on_fake_gpu() as observed, patch.object(ModelInputs, "run", counted):
        train(tokens_per_micro_batch=tokens)
        return len(observed.waits), len(passes)


def waits_of_a_pass(train: Callable[..., Any]) -> float:
    """Return the number of waits that a further forward pass adds to a step."""
    (waits, passes), (more_waits, more_passes) = (waits_and_passes(train, tokens) for tokens in (1000, 20))
    assert more_passes >= passes + 2
    return (more_waits - waits) / (more_passes - passes)


# The one wait is in transformers, which asks if a row has several samples.


@for_each("recipe", ["grpo", "ppo"])
def test_policy_optimization_waits_for_a_gpu_once_in_a_pass(recipe: str) -> None:
    algorithm, updates = canned.algorithm_of(recipe)
    assert waits_of_a_pass(partial(canned.gradients, algorithm, updates_per_step=updates)) == 1


def test_policy_optimization_without_packing_waits_for_a_gpu_at_most_once_in_a_pass() -> None:
    algorithm, updates = canned.algorithm_of("grpo")
    assert waits_of_a_pass(partial(canned.gradients, algorithm, updates_per_step=updates, packing=False)) <= 1


def test_sft_waits_for_a_gpu_once_in_a_pass() -> None:
    assert waits_of_a_pass(canned_answers.gradients) == 1


@for_each("case", ["dpo", "kto"])
def test_preference_optimization_waits_for_a_gpu_once_in_a_pass(case: str) -> None:
    assert waits_of_a_pass(partial(canned_preferences.gradients, case)) == 1


@for_each("case", list(canned_labels.CASES))
def test_reward_modeling_waits_for_a_gpu_once_in_a_pass(case: str) -> None:
    assert waits_of_a_pass(partial(canned_labels.gradients, case)) == 1
