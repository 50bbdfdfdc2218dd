"""Every recipe composes, fits the schema, describes a step with whole micro-batches, and stays short and explained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl_plugins.config.checks import check_batch, check_options
from rl_plugins.config.hydra_errors import CONFIG_FOLDER
from rl_plugins.config.recipe import parse_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch.algorithm_check import check_algorithm
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.pipeline import stage_configs
from rl_plugins.rewards.calling import Router
from rl_plugins.rewards.loading import find_callable
from rl_plugins.tests.launch.configurations import compose_once, configured

PIPELINES = ["sft_rm_ppo"]
RECIPES = sorted(path.stem for path in CONFIG_FOLDER.glob("*.yaml") if path.stem not in PIPELINES)
FILES = sorted(CONFIG_FOLDER.rglob("*.yaml"), key=str)
LONGEST = 60
# The other required options of a recipe or an algorithm, beside the model.
REQUIRED = {
    "safe_rlhf": ["cost_model.path=some/cost_model"],
    "on_policy_distillation": ["teacher.path=some/teacher"],
    "forward_kl_distillation": ["teacher.path=some/teacher"],
    # A machine of tests may have no sandbox.
    **{f"programs_{stage}": ["reward.functions.default.sandbox=none"] for stage in ("sft", "grpo")},
}


@pytest.fixture(autouse=True)
def _composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compose_once(monkeypatch)


def test_each_module_of_a_recipe_has_a_file_of_options():
    assert {"grpo", "sft", "quickstart_grpo", "quickstart_sft", "gsm8k_grpo"} <= set(RECIPES)
    modules = {path.stem for path in CONFIG_FOLDER.parent.glob("*.py")} - {"__init__", "quickstart"}
    assert modules <= {*RECIPES, *PIPELINES}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_passes_the_checks(name):
    config = parse_config(compose_config(name, ["model.path=some/model", *REQUIRED.get(name, [])]))
    check_options(config)
    check_batch(config)
    if config.stage in ("policy_optimization", "prime"):
        check_algorithm(config)
    if config.environment.stateful:
        assert not config.reward.functions
        find_callable({"_target_": config.environment.stateful}, "environment.stateful")
    elif config.generates:
        assert Router(config.reward.functions).functions


@pytest.mark.parametrize("name", PIPELINES)
def test_stage_configs_of_a_pipeline_pass_the_checks(name):
    files = [f"data.{split}=[{split}.parquet]" for split in ("sft", "pairs", "prompts")]
    configs = stage_configs(compose_config(name, ["model=some/model", "++common.sampling.max_tokens=9", *files]))
    assert list(configs) == ["sft", "reward_model", "ppo"]
    for stage, config in configs.items():
        check_options(config)
        check_batch(config)
        assert (config.run.name, config.sampling.max_tokens) == (stage, 9)
    # Each stage starts from the models of the stages before.
    folder = Path(configs["sft"].run.output_dir)
    assert configs["sft"].model.path == "some/model" and folder.name == "sft_rm_ppo"
    assert Path(configs["ppo"].model.path).absolute() == folder / "sft" / "policy"
    assert configs["ppo"].critic.path == configs["ppo"].reward_model.path
    assert Path(str(configs["ppo"].critic.path)).absolute() == folder / "reward_model" / "reward_model"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("++stages.ppo.options.optimizer.rate=1", r"stage ppo: .*rate"),
        ("++stages.ppo.recipe=pppo", "stage ppo: .*pppo"),
        ("++stages.sft.options.run.steps=many", "stage sft: .*steps"),
    ],
)
def test_stage_configs_name_the_stage_with_a_wrong_option(override, message):
    files = [f"data.{split}=[{split}.parquet]" for split in ("sft", "pairs", "prompts")]
    with pytest.raises(ConfigError, match=message):
        stage_configs(compose_config("sft_rm_ppo", ["model=some/model", *files, override]))


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIG_FOLDER / group).glob("*.yaml"))


@pytest.mark.parametrize("name", choices("algorithm"))
def test_check_algorithm_accepts_the_algorithm(name):
    check_algorithm(configured("grpo", "model.path=m", f"algorithm={name}", *REQUIRED.get(name, [])))


@pytest.mark.parametrize("name", sorted({*choices("reward")} - {"file", "environment"}))
def test_router_loads_the_reward(name):
    further = {
        "judge": ["reward.judge.url=http://localhost:8000/v1", "reward.judge.model=judge"],
        # A machine of tests may have no sandbox.
        "code_tests": ["reward.functions.default.sandbox=none"],
    }
    config = configured("grpo", "model.path=m", f"reward={name}", *further.get(name, []))
    assert Router(config.rewards).functions


def test_files_of_options_explain_themselves_and_their_defaults():
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# "), path
        if "defaults:" in lines:
            first = lines.index("defaults:") + 1
            entries = [line for line in lines[first:] if re.match(r"  - ", line)]
            assert entries, path
            assert [line for line in entries if " # " not in line] == [], path


def test_files_of_recipes_are_short() -> None:
    files = [*FILES, *CONFIG_FOLDER.parent.glob("*.py")]
    assert {file.name: lines for file in files if (lines := len(file.read_text().splitlines())) > LONGEST} == {}
