"""load_callable finds a reward by `_target_` or by file, and suggests a similar name if there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rl_plugins.errors import ConfigError
from rl_plugins.rewards.loading import load_callable, plain

SOURCE = """
from dataclasses import dataclass
LIMIT = 3
def compute_score(solution_str): return 1.0
@dataclass
class Judge:
    url: str
    def __call__(self, solution_str): return 0.5
class Mute:
    pass
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def test_load_callable_returns_a_function_and_the_options() -> None:
    name, function, options = load_callable({"_target_": "math.isclose", "rel_tol": 0.1}, "reward")
    assert (name, function(1, 1), options) == ("math.isclose", True, {"rel_tol": 0.1})


def test_load_callable_returns_a_function_of_a_file(reward_file: Path) -> None:
    _, function, options = load_callable({"path": str(reward_file), "name": "compute_score", "weight": 2}, "reward")
    assert (function("x"), options) == (1.0, {"weight": 2})


def test_load_callable_builds_a_class_of_a_file_with_the_options(reward_file: Path) -> None:
    judge: Any
    _, judge, options = load_callable({"path": str(reward_file), "name": "Judge", "url": "there"}, "reward")
    assert (judge.url, judge("x"), options) == ("there", 0.5, {})


def test_plain_converts_omegaconf_containers() -> None:
    config = OmegaConf.create({"a": [1, {"b": "${c}"}], "c": 2})
    result = plain(config)
    assert result == {"a": [1, {"b": 2}], "c": 2}
    assert type(result["a"]) is list and type(result["a"][1]) is dict


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"weight": 1}, "give `_target_`, or `path` and `name`"),
        ({"path": "x.py"}, "give `_target_`, or `path` and `name`"),
        ({"_target_": "exact_match"}, "must be dotted"),
        ({"_target_": "rl_plugins.rewards.scorers.exact_mach"}, "did you mean 'exact_match'"),
        ({"_target_": "rl_plugins.rewards.scorer.exact_match"}, "did you mean 'scorers'"),
        ({"_target_": "nowhere_at_all.f"}, "no module 'nowhere_at_all'"),
        ({"_target_": "rl_plugins.__version__"}, "not as a function or class"),
        (
            {"_target_": "rl_plugins.rewards.scorers.MathVerify", "tolerance": 1},
            "unexpected keyword argument",
        ),
    ],
)
def test_load_callable_refuses_a_wrong_configuration(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_callable(config, "reward")


def test_load_callable_suggests_a_file_of_a_similar_name(reward_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; did you mean .*my_rewards\.py"):
        load_callable({"path": str(reward_file.with_name("my_reward.py")), "name": "compute_score"}, "reward")


def test_load_callable_suggests_a_similar_name_in_the_file(reward_file: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'compute_score'"):
        load_callable({"path": str(reward_file), "name": "compute_scores"}, "reward")


def test_load_callable_reads_a_number_as_a_name(reward_file: Path) -> None:
    with pytest.raises(ConfigError, match="has no '3'"):
        load_callable({"path": str(reward_file), "name": 3}, "reward")


def test_load_callable_lists_the_names_of_the_file(reward_file: Path) -> None:
    with pytest.raises(ConfigError, match="there is: Judge, Mute, compute_score"):
        load_callable({"path": str(reward_file), "name": "zzz"}, "reward")


def test_load_callable_refuses_a_class_without_call(reward_file: Path) -> None:
    with pytest.raises(ConfigError, match="no method __call__"):
        load_callable({"path": str(reward_file), "name": "Mute"}, "reward")


def test_load_callable_refuses_a_file_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "rewards.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"must end in \.py"):
        load_callable({"path": str(tmp_path / "rewards.txt"), "name": "f"}, "reward")


def test_load_callable_names_a_missing_dependency_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_rewards.py").write_text("import a_package_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="importing needy_rewards failed: No module named 'a_package_nobody_has'"):
        load_callable({"_target_": "needy_rewards.f"}, "reward")


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("1 / 0", "f", r"f': its file failed: ZeroDivisionError: division by zero \(.*broken\.py:1\)"),
        ("import sys; sys.exit(0)", "f", "its file failed: SystemExit: 0"),
        ("def f(:", "f", "its file failed: .*SyntaxError: invalid syntax"),
        ("class F:\n  def __init__(self): open('/nowhere')", "F", "its constructor failed: FileNotFoundError.*:2"),
        ("import os\npid = os.fork()\nos.waitpid(pid, 0)\nnone", "f", "NameError: name 'none' is not defined"),
    ],
)
def test_load_callable_tells_an_error_of_the_file_in_one_line(
    tmp_path: Path, source: str, name: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as raised:
        load_callable({"path": str(tmp_path / "broken.py"), "name": name}, "reward")
    assert "\n" not in str(raised.value)
