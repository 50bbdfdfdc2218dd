"""Errors name the options of a recipe in place of Python arguments."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import rl_plugins
from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError, DataError, RowError, UserError
from rl_plugins.launch.argument_errors import RUN_OPTIONS, errors_with_options, options_in, with_options
from rl_plugins.launch.training import DataOptions
from rl_plugins.stages.arguments import PreferenceArguments, StageArguments
from rl_plugins.tests.loops import for_each

PACKAGE = Path(rl_plugins.__file__).parent
# Rooms whose functions a run calls with arguments.
ROOMS = ("callbacks", "data", "environments", "models", "rewards", "rollout", "stages", "strategies", "weights")
WITHOUT_OPTION = {
    "tokenizer": "belongs to model.path",
    "eval_sampling": "built from `sampling` and `validation`",
    "validate_on": "follows from the stage, and the option of SFT is checked before",
}
WRITTEN_WITH_OPTION = re.compile(r"in a recipe|Python: ")


def shown(error: UserError) -> UserError:
    """Return the error that a user of a recipe gets for an error of a stage."""
    with pytest.raises(UserError) as raised, errors_with_options(RUN_OPTIONS):
        raise error
    return raised.value


def set_arguments() -> set[str]:
    """Return the arguments that recipes give to stages, data modules and strategies."""
    names: set[str] = set()
    for record in (StageArguments, PreferenceArguments, DataOptions):
        names |= record.__annotations__.keys()
    for path in (PACKAGE / "recipes").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("rl."):
                names |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    (function,) = (
        node
        for node in ast.walk(ast.parse((PACKAGE / "launch" / "ray_train.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "ray_strategy"
    )
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("Ray"):
            names |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        elif isinstance(node, ast.Dict):
            names |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
    return names


def text_of(node: ast.expr) -> str:
    """Return the text of a string expression, with `X` for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "X"


def messages() -> Iterator[tuple[str, str]]:
    """Yield place and text of each message of a ConfigError or a DataError in the rooms."""
    for path in sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_error = isinstance(node, ast.Call) and ast.unparse(node.func) in ("ConfigError", "DataError")
            if is_error and isinstance(node, ast.Call) and node.args:
                yield f"{path.name}, line {node.lineno}", text_of(node.args[0])


def value_of(option: str) -> Any:
    """Return the default of an option of a recipe."""
    value: Any = RecipeConfig(stage="policy_optimization")
    for name in option.split("."):
        value = getattr(value, name)
    return value


def test_run_options_has_every_argument_that_a_recipe_sets() -> None:
    groups = {field.name for field in fields(RecipeConfig)}
    arguments = set_arguments()
    assert {"tokens_per_micro_batch", "updates_per_step", "label_key", "tensor_parallel", "loss"} <= arguments
    assert arguments - RUN_OPTIONS.keys() - groups == WITHOUT_OPTION.keys()


def test_run_options_names_options_of_recipes() -> None:
    for option in RUN_OPTIONS.values():
        if not option.startswith(("algorithm.", "process_reward_model.")):
            value_of(option)


def test_messages_of_the_library_name_no_argument_after_the_replacement() -> None:
    arguments = set_arguments() - WITHOUT_OPTION.keys() - {field.name for field in fields(RecipeConfig)}
    names = "|".join(sorted(name for name in arguments if "_" in name))
    words = "|".join(sorted(name for name in arguments if "_" not in name))
    left = re.compile(
        rf"(?<![\w.])(?:{names})(?![\w.])|(?<![\w.])(?:{words})="
        rf"|\b(?:change|lower|leave|raise|set|use|or) (?:{words})(?: out| or|,|:|$)"
    )
    checked, wrong = 0, []
    for place, text in messages():
        if WRITTEN_WITH_OPTION.search(text) is None:
            checked += left.search(text) is not None
            if found := left.search(with_options(text, RUN_OPTIONS)):
                wrong.append(f"{place}: {found.group()} in {text}")
    assert wrong == [] and checked > 20


@for_each(
    ("message", "expected"),
    [
        (
            "num_samples=1: a pair needs at least two responses to a prompt: raise num_samples",
            "batch.samples_per_prompt=1: a pair needs at least two responses to a prompt: raise "
            "batch.samples_per_prompt",
        ),
        (
            "updates_per_step=3 does not divide the 8 prompts of a rank: change updates_per_step or prompts_per_step",
            "batch.updates_per_step=3 does not divide the 8 prompts of a rank: change batch.updates_per_step or "
            "batch.prompts_per_step",
        ),
        (
            "router_replay=recompute: the same anyway: raise updates_per_step or passes_per_step, or leave "
            "router_replay out",
            "model.router_replay=recompute: the same anyway: raise batch.updates_per_step or batch.passes_per_step, or "
            "leave model.router_replay out",
        ),
        (
            "router_losses: no router has a gradient: train more layers, or leave router_losses out",
            "model.router_losses: no router has a gradient: train more layers, or leave model.router_losses out",
        ),
        (
            "LigerKernels: no kernels for the policy: leave LigerKernels out",
            "model.liger: no kernels for the policy: leave model.liger out",
        ),
        (
            "the algorithm needs values_BT: name the model that the critic starts from with "
            "critic=CriticConfig(path=...)",
            "the algorithm needs values_BT: name the model that the critic starts from with critic.path=...",
        ),
        ("packing=True: no packing: leave packing out", "batch.packing=True: no packing: leave batch.packing out"),
        ("set `train` to a file, and train", "set `data.train_files` to a file, and train"),
        ("scorer: the environment scores: leave scorer out", "reward: the environment scores: leave reward out"),
    ],
)  # fmt: skip
def test_with_options_names_options_in_all_parts_of_a_message(message: str, expected: str) -> None:
    assert with_options(message, RUN_OPTIONS) == expected


@for_each(
    "message",
    [
        "batch.updates_per_step=3 does not divide 8: change batch.updates_per_step",
        "model.router_losses: leave model.router_losses out",
        "set packing=False in the stage (batch.packing=false in a recipe)",
        "data/seed=3.parquet: no such file",
        "column 'label_key' is missing",
        "reward_model.path=x: the reference has another vocabulary",
    ],
)
def test_with_options_keeps_options_paths_data_and_words(message: str) -> None:
    assert with_options(message, RUN_OPTIONS) == message


def test_errors_with_options_takes_the_options_of_a_group() -> None:
    options = options_in("environment", ["max_turns", "deadline_s"])
    message = r"^environment\.max_turns=0 is too small, or raise environment\.deadline_s$"
    with pytest.raises(ConfigError, match=message), errors_with_options(options):
        raise ConfigError("max_turns=0 is too small, or raise deadline_s")


def test_errors_with_options_keeps_the_class_of_an_error() -> None:
    assert type(shown(DataError("step 3: too easy: change the data, or raise num_samples"))) is DataError
    row = RowError("a.parquet, row 3", "num_samples", "is empty")
    assert shown(row) is row
