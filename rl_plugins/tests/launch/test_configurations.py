from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.compose import compose_config, difference
from rl_plugins.tests.launch.configurations import compose_config_once, configured, message_of


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("grpo", ["guard.kl=1", "run.time_limit=null", "data.train_files=[a.parquet,b.parquet]"]),
        ("ppo", ["stage=prime", "algorithm=rloo", "algorithm.kl.coefficient=0.5", "critic.path='a b'"]),
        ("sft", ["data.mixture={a: {files: [a.parquet]}}", "reward=file", "reward.functions.default.path=rewards.py"]),
        ("grpo", ["~algorithm.kl", "+algorithm.advantage_options.x=1", "++rollout.engines=per_worker"]),
    ],
)
def test_configured_equals_parse_config_of_the_composed_recipe(recipe, overrides):
    overrides = ["model.path=model", *overrides]
    assert configured(recipe, *overrides) == parse_config(compose_config(recipe, overrides))


def test_configured_refuses_an_unknown_option():
    assert message_of(lambda: configured("grpo", "model.path=model", "run.stepz=1")).startswith("there is no option")


def test_difference_has_the_options_that_differ_from_the_recipe() -> None:
    overrides = ["model.path=tiny", "data.train_files=[a.parquet]", "reward=exact_match", "optimizer.lr=0.5"]
    config = OmegaConf.structured(configured("grpo", *overrides))
    changes = difference(compose_config_once("grpo", ()), config).splitlines()
    assert "optimizer.lr: 0.5  # recipe: 1.0e-06" in changes and "model.path: tiny  # recipe: ???" in changes
    assert len(changes) < 7
