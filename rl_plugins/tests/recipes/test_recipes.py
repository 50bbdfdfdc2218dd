"""Every recipe composes, fits the schema, describes a step that comes out even, and stays short and explained."""

from __future__ import annotations

import re

import pytest

from rl_plugins.launch.batch import check_batch
from rl_plugins.launch.command_line import compose_config
from rl_plugins.launch.config import parse_config
from rl_plugins.launch.hydra_errors import CONFIG_FOLDER
from rl_plugins.launch.trials import check_algorithm
from rl_plugins.launch.values import check_values
from rl_plugins.rewards.routing import Router

RECIPES = sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml"))
FILES = sorted(CONFIG_FOLDER.rglob("*.yaml"), key=str)
LONGEST = 60


def test_the_recipes_are_there():
    assert {"grpo", "sft", "quickstart_grpo", "quickstart_sft", "gsm8k_grpo"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_run(name):
    config = parse_config(compose_config(name, ["model.path=some/model"]))
    check_values(config)
    check_batch(config)
    if config.stage == "policy_optimization":
        check_algorithm(config.algorithm)
    assert Router(config.reward.functions).scorers


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_FOLDER / group).glob("*.yaml"))


@pytest.mark.parametrize("name", choices("algorithm"))
def test_an_algorithm_can_run(name):
    check_algorithm(parse_config(compose_config("grpo", ["model.path=m", f"algorithm={name}"])).algorithm)


@pytest.mark.parametrize("name", [name for name in choices("reward") if name != "file"])
def test_a_reward_loads(name):
    assert Router(parse_config(compose_config("grpo", ["model.path=m", f"reward={name}"])).reward.functions).scorers


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIG_FOLDER)))
def test_a_file_is_short_and_explained(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= LONGEST
    assert lines[0].startswith("# ")
    if "defaults:" in lines:
        first = lines.index("defaults:") + 1
        entries = [line for line in lines[first:] if re.match(r"  - ", line)]
        assert entries
        assert [line for line in entries if " # " not in line] == []
