"""Settings of a judge: ranges, templates, and judges in the configuration of rewards."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.config.checks import check_options
from rl_plugins.config.judge import (
    ENGINE_KEY,
    JudgeConfig,
    check_deadline,
    judges_of,
    key_variables,
    models_of_engines,
    with_engines,
    with_judges,
)
from rl_plugins.config.recipe import changed_options, parse_config, public_options
from rl_plugins.errors import ConfigError
from rl_plugins.rewards.code_tests import CodeTests
from rl_plugins.rewards.judge import TEMPLATE, Judge
from rl_plugins.tests.launch.configurations import configured
from rl_plugins.tests.loops import for_each

NODE = {"_target_": "rl_plugins.rewards.judge.Judge"}
JUDGE = ["model.path=m", "reward=judge", "reward.judge.url=http://localhost:8000/v1", "reward.judge.model=judge"]


@for_each(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "url=localhost:8000: must be an address"),
        ({"url": "ftp://host/v1"}, "must be an address"),
        ({"url": "http://:80"}, "must be an address"),
        ({"url": "http://host:port"}, "must be an address"),
        ({"url": "http://me:word@host/v1"}, "the address has a user or a password"),
        ({"template": 3}, "template=3: must be a text, or null"),
        ({"request": "top_p=1"}, "request=top_p=1: must be a mapping"),
        ({"low": 10.0}, "low=10: must be below high=10"),
        ({"low": float("nan")}, "low=nan"),
        ({"votes": 0}, "votes=0: must be from 1 to 100"),
        ({"votes": 3}, "votes=3: with temperature=0 all votes are equal"),
        ({"template": "{response} {anwser}"}, ": there is no {anwser}: use prompt, response"),
        ({"template": "{responses}"}, "did you mean {response}?"),
        ({"template": "{response} {extra_info}"}, "there is no {extra_info}"),
        ({"template": "{{response}}"}, "template={{response}}: the judge does not see the response"),
        ({"template": "{response}", "template_file": "a"}, "template is given, too"),
        ({"scale": "percent"}, "scale=percent: use one of unit, raw"),
        ({"wait_s": -1.0}, "wait_s=-1.0: must be from 0 to 2000000"),
        ({"requests_per_minute": 0.0}, "requests_per_minute=0.0: must be above 0"),
        ({"concurrent_requests": 0}, "concurrent_requests=0"),
        ({"price_in": -1.0}, "price_in=-1.0"),
    ],
)
def test_judge_config_refuses_wrong_values(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        JudgeConfig(**options)
    assert message in str(caught.value) and "word@" not in str(caught.value)


def test_judge_config_does_not_show_a_key_in_place_of_a_variable() -> None:
    with pytest.raises(ConfigError) as caught:
        JudgeConfig(key_variable="sk-very-secret")
    assert "JUDGE_API_KEY" in str(caught.value) and "secret" not in str(caught.value)


def test_judge_config_takes_the_own_template() -> None:
    assert JudgeConfig(template=TEMPLATE).template == TEMPLATE


def test_with_judges_gives_settings_to_judges_without_a_config() -> None:
    judge, own = JudgeConfig(key_variable="A_KEY"), {"key_variable": "B_KEY"}
    rewards = {
        "a": NODE,
        "b": {
            "_target_": "sum",
            "rewards": {"x": {"_target_": "rl_plugins.Judge", "config": own}, "y": {"_target_": "z"}},
        },
    }
    full = with_judges(rewards, judge, 3)
    assert full["a"] == {**NODE, "config": judge, "processes": 3}
    assert full["b"]["rewards"]["x"]["config"] == own and full["b"]["rewards"]["y"] == {"_target_": "z"}
    assert len(list(judges_of(full))) == 2 and key_variables(full) == ["A_KEY", "B_KEY"]
    assert list(judges_of({"_target_": Judge})) == [{"_target_": Judge}]


def test_with_engines_gives_addresses_to_judges_without_an_address() -> None:
    own = {"_target_": "rl_plugins.Judge", "config": {"url": "http://h/v1", "key_variable": "A_KEY"}}
    rewards = with_judges({"a": NODE, "b": {"_target_": "sum", "rewards": {"x": own}}}, JudgeConfig(model="m"), 2)
    assert models_of_engines(rewards) == ["m"] and with_engines(rewards, [], "copy") == rewards
    full = with_engines(rewards, ["http://e/v1"], "copy")
    assert full["a"]["urls"] == ["http://e/v1"] and full["a"]["config"].model == "copy"
    assert full["b"] == rewards["b"] and key_variables(full) == ["A_KEY", ENGINE_KEY]


def test_check_deadline_needs_time_for_the_wait() -> None:
    rewards = with_judges({"default": NODE}, JudgeConfig(wait_s=100, timeout_s=20), 1)
    check_deadline(rewards, 120, "reward.deadline_s")
    with pytest.raises(ConfigError, match=r"--deadline=30 is below the 120 s"):
        check_deadline(rewards, 30, "--deadline")
    with pytest.raises(ConfigError, match="config of a judge: urll: a judge has no such option"):
        check_deadline({"default": {**NODE, "config": {"urll": ""}}}, 30, "--deadline")


def test_check_deadline_needs_time_for_all_tests_of_a_program() -> None:
    tests = {"_target_": "rl_plugins.rewards.code_tests.CodeTests"}
    check_deadline({"default": {"_target_": "sum", "rewards": {"x": tests}}}, 21, "--deadline")
    for node, deadline_s in (({"_target_": CodeTests}, 20), ({**tests, "total_s": 90}, 60)):
        with pytest.raises(
            ConfigError, match=rf"--deadline={deadline_s} is not above total_s=\d0 of the reward CodeTests"
        ):
            check_deadline({"default": {"_target_": "sum", "rewards": {"x": node}}}, deadline_s, "--deadline")
    with pytest.raises(ConfigError, match=r"^reward\.deadline_s=20 is not above total_s=20"):
        check_options(configured("grpo", "model.path=m", "reward=code_tests", "reward.deadline_s=20"))


def test_recipe_gives_the_judge_to_rewards_and_writes_options_once() -> None:
    config = configured("grpo", *JUDGE, "reward.judge.template_file=rubric.txt", "placement.num_workers=2")
    check_options(config)
    (judge,) = judges_of(config.rewards)
    assert judge["config"] is config.reward.judge and judge["processes"] == 2
    assert str(config.reward.judge.template_file).startswith("/")
    options = changed_options(config)
    assert options["reward.judge.model"] == "judge" and options["reward.functions.default._target_"] == NODE["_target_"]
    assert not any(name.startswith("reward.functions.default.config") for name in options)
    assert parse_config(public_options(config)).reward == config.reward


@for_each(
    ("options", "message"),
    [
        (["reward.judge.votes=0"], "reward.judge.votes=0: must be from 1 to 100"),
        (["reward.judge.wait_s=1000"], "reward.deadline_s=900 is below the 1060 s of reward.judge.wait_s=1000"),
        (
            ["placement.num_workers=2", "strategy.collective_timeout_s=600"],
            "at most strategy.collective_timeout_s=600: raise this option",
        ),
    ],
)
def test_recipe_refuses_wrong_options_of_a_judge(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(configured("grpo", *JUDGE, *options))
    assert message in str(caught.value)
