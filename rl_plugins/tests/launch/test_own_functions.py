"""Advantages and policy losses of a user, named on the command line."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.config.recipe import RecipeConfig, parse_config
from rl_plugins.launch.algorithm_check import check_algorithm
from rl_plugins.launch.compose import compose_config, compose_for_command_line
from rl_plugins.launch.instantiation import instantiate_node
from rl_plugins.tests.launch.configurations import message_of
from rl_plugins.tests.loops import for_each

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_algorithm"
MODEL = "model.path=model"
PENALIZED = "algorithm.policy_loss={_target_: own_algorithm.penalized_ratio, _partial_: true, %s}"


@pytest.fixture(autouse=True)
def _example_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def composed(*overrides: str) -> RecipeConfig:
    return parse_config(compose_config("grpo", [MODEL, *overrides]))


def algorithm_of(config: RecipeConfig) -> Algorithm:
    built: Algorithm = instantiate_node("algorithm", config.algorithm)
    return built


def test_dotted_names_replace_the_functions_and_leave_no_options_behind() -> None:
    config = composed(
        "algorithm.advantage=own_algorithm.median_baseline",
        "algorithm.policy_loss=own_algorithm.penalized_ratio",
        "+algorithm.policy_loss_options.strength=2.0",
    )
    check_algorithm(config)
    algorithm = algorithm_of(config)
    assert algorithm.advantage_function.__name__ == "median_baseline"
    assert algorithm.policy_loss_function.__name__ == "penalized_ratio"
    assert config.algorithm["advantage_options"] == {}
    assert config.algorithm["policy_loss_options"] == {"strength": 2.0}


def test_partial_node_replaces_the_policy_loss_and_has_arguments() -> None:
    config = composed(PENALIZED % "strength: 2.0")
    check_algorithm(config)
    function: Any = algorithm_of(config).policy_loss_function
    assert isinstance(function, partial) and function.keywords == {"strength": 2.0}
    assert config.algorithm["advantage_options"] == {"scale": "group"}


def test_partial_node_replaces_the_advantage_and_leaves_no_options_behind() -> None:
    config = composed("algorithm.advantage={_target_: own_algorithm.median_baseline, _partial_: true}")
    check_algorithm(config)
    function: Any = algorithm_of(config).advantage_function
    assert isinstance(function, partial) and function.func.__name__ == "median_baseline"
    assert config.algorithm["advantage_options"] == {} and "dual_clip" in config.algorithm["policy_loss_options"]


def test_options_of_a_replaced_function_do_not_stay_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo", MODEL, "algorithm.advantage=rloo", "+algorithm.kl.own=1"])
    ((config, recipe),) = compose_for_command_line("grpo")
    assert recipe == "grpo"
    assert config.algorithm.advantage_options == {} and config.algorithm.policy_loss_options.dual_clip == 3.0
    selecting = compose_config("grpo", [MODEL, "algorithm=clip_cov", "algorithm.policy_loss=ppo_clip"]).algorithm
    assert selecting.selection_options == selecting.policy_loss_options == {}


def test_options_stay_if_an_override_names_the_own_function_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["algorithm=dapo", "algorithm.policy_loss=ppo_clip", "algorithm.advantage=grpo"]
    assert compose_config("grpo", [MODEL, *overrides]).algorithm.policy_loss_options.clip_high == 0.28
    monkeypatch.setattr(sys, "argv", ["grpo", MODEL, *overrides])
    ((config, _),) = compose_for_command_line("grpo")
    assert config.algorithm.policy_loss_options.clip_high == 0.28


@for_each(
    ("override", "words"),
    [
        (PENALIZED % "strenght: 2.0", ["policy_loss: penalized_ratio", "'strenght'", "its arguments are", "strength"]),
        (PENALIZED % "strength: much", ["algorithm.policy_loss_options.strength=much", "a finite number"]),
        ((PENALIZED % "strength: 2.0").replace(" _partial_: true,", ""), ["algorithm.policy_loss", "_partial_: true"]),
        ("algorithm.advantage=own_algorithm.mean", ["advantage=own_algorithm.mean: ", "correct the path"]),
        ("algorithm.advantage=no_such.mean", ["advantage=no_such.mean: ", "PYTHONPATH"]),
        ("algorithm.advantage=own_algorithm.__name__", ["must be a name, a dotted path or a function"]),
        ("algorithm.advantage=grop", ["algorithm.advantage='grop' is unknown", "grpo"]),
    ],
)
def test_wrong_functions_of_a_user_are_refused(override: str, words: list[str]) -> None:
    message = message_of(lambda: check_algorithm(composed(override)))
    assert not [word for word in words if word not in message], message


class Median:
    """An advantage as an object."""

    def __call__(self, *, token_level_rewards_BT: Any, response_mask_BT: Any) -> Any:
        return token_level_rewards_BT * response_mask_BT, token_level_rewards_BT


def test_callable_object_is_an_advantage() -> None:
    check_algorithm(composed(f"algorithm.advantage={{_target_: {__name__}.Median}}"))
