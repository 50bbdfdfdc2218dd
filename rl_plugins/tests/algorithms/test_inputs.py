"""`INPUTS` describes every input, and a function gets the inputs named by its signature."""

from __future__ import annotations

from functools import partial
from typing import Any

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.inputs import (
    ALWAYS_GIVEN_TO_ADVANTAGES,
    ALWAYS_GIVEN_TO_LOSSES,
    COMPUTED_FOR_ADVANTAGES,
    COMPUTED_FOR_LOSSES,
    INPUTS,
    call_with,
    required_inputs,
)
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES


def target(*, first: int, second: int, third: int = 3, fourth: int | None = None) -> tuple[Any, ...]:
    return first, second, third, fourth


def test_required_inputs_have_neither_default_nor_option() -> None:
    assert required_inputs(target, {}) == ["first", "second"]
    assert required_inputs(target, {"second": 1}) == ["first"]
    assert required_inputs(partial(target, first=1), {}) == ["second"]


def test_call_with_leaves_out_none_and_prefers_options() -> None:
    inputs = {"first": 1, "second": 2, "third": None, "fourth": 4, "fifth": 5}
    assert call_with(target, inputs, {}) == (1, 2, 3, 4)
    assert call_with(target, inputs, {"second": 20, "third": 30}) == (1, 20, 30, 4)


def test_call_with_gives_all_inputs_to_a_function_with_kwargs() -> None:
    def everything(**inputs: int) -> dict[str, int]:
        return inputs

    assert call_with(everything, {"one": 1, "none": None}, {"two": 2}) == {"one": 1, "two": 2}


def test_inputs_describe_every_input_that_the_stage_gives_or_computes() -> None:
    given = ALWAYS_GIVEN_TO_ADVANTAGES | ALWAYS_GIVEN_TO_LOSSES
    assert given | COMPUTED_FOR_ADVANTAGES | COMPUTED_FOR_LOSSES <= set(INPUTS)


def test_required_inputs_of_a_function_without_a_star() -> None:
    def own(token_level_rewards_BT: Any, values_BT: Any, beta: float = 1.0) -> Any:
        raise AssertionError("the function is not called")

    assert required_inputs(own, {}) == ["token_level_rewards_BT", "values_BT"]
    assert "values_BT" in Algorithm(advantage=own).needs


def test_inputs_contain_the_required_inputs_of_every_advantage_and_policy_loss() -> None:
    for table in (ADVANTAGES, POLICY_LOSSES):
        for name, function in table.items():
            # The penalty of DRO is an option without a default.
            assert set(required_inputs(function, {"beta": 1.0})) <= set(INPUTS), name
