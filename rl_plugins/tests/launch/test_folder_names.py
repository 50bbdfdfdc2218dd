"""Names of runs and pipelines, which become folders."""

from __future__ import annotations

import pytest

from rl_plugins.config.run import RunConfig
from rl_plugins.errors import ConfigError
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.pipeline import stage_configs
from rl_plugins.tests.loops import for_each


@for_each(
    "name",
    ["", ".", "..", "a/b", "/a", ".hidden", " a", "a ", "a\nb", "a\x1b[2J", "a\x00", "a" * 201, "é" * 101, "\udc80"],
)
def test_run_config_refuses_a_name_that_is_no_folder_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name=.*must be the name of a folder") as error:
        RunConfig(name=name)
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


@for_each("name", ["grpo", "run 2", "qwen-7b_lr=1e-6", "a.b", "größe", "a" * 200])
def test_run_config_takes_a_name_of_printable_characters(name: str) -> None:
    assert RunConfig(name=name).name == name


def test_stage_configs_refuses_a_pipeline_name_that_is_no_folder_name() -> None:
    options = ["model=m", "data.sft=[a]", "data.pairs=[b]", "data.prompts=[c]", "name=../up"]
    with pytest.raises(ConfigError, match=r"^name='\.\./up': must be the name of a folder"):
        stage_configs(compose_config("sft_rm_ppo", options))
