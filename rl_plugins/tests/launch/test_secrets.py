"""Files of a run have no secrets, and commands take the secrets from the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from rl_plugins.config.hydra_errors import keys_of
from rl_plugins.config.recipe import RecipeConfig, parse_config, write_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch import preflight
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.mlflow_run import describe_run
from rl_plugins.redaction import is_secret
from rl_plugins.run_folder import RunFolder, append_metrics

KEY, LITERAL, PASSWORD = "sk-of-the-environment", "sk-of-the-command-line", "pass-of-the-store"
OVERRIDES = [
    "launcher=local", "rollout.engine=transformers", f"tracking.uri=http://me:{PASSWORD}@localhost:5000",
    "+reward.functions.judge={_target_: judge.score}", "+reward.functions.judge.api_key=${oc.env:JUDGE_KEY}",
    f"+reward.functions.other.api_key={LITERAL}", "+reward.functions.other.header=${reward.functions.judge.api_key}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def parsed(*overrides: str) -> RecipeConfig:
    return parse_config(compose_config("grpo", ["model.path=tiny", "run.name=run", *overrides]))


@pytest.fixture
def config(tmp_path: Path) -> RecipeConfig:
    return parsed(*OVERRIDES, f"run.output_dir={tmp_path}")


def test_write_config_keeps_expressions_of_the_environment_and_no_secret(config: RecipeConfig, tmp_path: Path) -> None:
    assert config.reward.functions["other"] == {"api_key": LITERAL, "header": KEY}
    file = tmp_path / "config.yaml"
    write_config(config, file)
    text = file.read_text()
    assert not any(secret in text for secret in (KEY, LITERAL, PASSWORD))
    written: Any = OmegaConf.to_container(OmegaConf.load(file))
    assert written["reward"]["functions"] == {
        "default": {"_target_": "rl_plugins.rewards.scorers.exact_match"},
        "judge": {"_target_": "judge.score", "api_key": "${oc.env:JUDGE_KEY}"},
        "other": {"api_key": "***", "header": "${oc.env:JUDGE_KEY}"},
    }
    assert written["tracking"]["uri"] == "http://localhost:5000"
    again = parse_config(OmegaConf.load(file))
    assert again.reward.functions["judge"]["api_key"] == KEY and again.run == config.run


def test_write_config_writes_a_value_that_has_changed_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICY", "models:/solver@champion")
    monkeypatch.setenv("STEPS", "3")
    config = parsed("model.path=${oc.env:POLICY}", 'run.steps="${oc.decode:${oc.env:STEPS}}"')
    assert config.run.steps == 3
    config.model.path = "/cache/solver/1"
    write_config(config, tmp_path / "config.yaml")
    written: Any = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"))
    assert written["model"]["path"] == "/cache/solver/1"
    assert written["run"]["steps"] == "${oc.decode:${oc.env:STEPS}}"


def test_parse_config_takes_the_password_of_a_store_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with_password = f"http://me:{PASSWORD}@localhost:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", with_password)
    for uri, expected in (
        (None, with_password),
        ("http://localhost:5000", with_password),
        ("http://localhost:5001", "http://localhost:5001"),
    ):
        assert parsed(f"tracking.uri={uri}" if uri else "run.steps=1").tracking.uri == expected


def test_parse_config_names_a_variable_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"reward\.functions\.judge\.api_key.*'JUDGE_KEY' not found"):
        parsed(*OVERRIDES)


def test_files_of_a_failed_run_have_no_secret(
    config: RecipeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    (project / "tiny").mkdir(parents=True)
    (project / "judge.py").write_text("API_KEY = None\n")
    (project / ".env").write_text("")
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        subprocess.run([*git, *command], cwd=project, check=True)
    (project / "judge.py").write_text(f'API_KEY = "{LITERAL}"\nscore(api_key=API_KEY)\n')
    (project / ".env").write_text(f"A={KEY}\n")
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["grpo", *OVERRIDES])

    def train(config: RecipeConfig, folder: RunFolder) -> None:
        append_metrics(folder.metrics, {"train/loss": 1.0}, 1)
        folder.add_failure("worker 0 failed", f"judge(api_key='{LITERAL}') of {config.tracking.uri}")
        raise RuntimeError(f"no answer of {config.tracking.uri} for {config.reward.functions['judge']}")

    monkeypatch.setitem(sys.modules, "rl_plugins.launch.local", SimpleNamespace(train_in_this_process=train))
    monkeypatch.setattr(preflight, "preflight", lambda config: None)
    with pytest.raises(RuntimeError, match="no answer"):
        run_recipe(config, "grpo")
    folder = RunFolder(tmp_path / "run")
    texts = {file.name: file.read_text() for file in folder.path.iterdir() if file.is_file()}
    assert {"config.yaml", "changes.yaml", "environment.txt", "git.diff", "error.txt", "failures.txt"} <= texts.keys()
    assert "report.html" in texts and "http://localhost:5000" in texts["error.txt"]
    assert "+score(api_key=API_KEY)" in texts["git.diff"] and "+API_KEY = ***" in texts["git.diff"]
    assert "api_key: ${oc.env:JUDGE_KEY}" in texts["changes.yaml"]
    leaks = [(name, secret) for name, text in texts.items() for secret in (LITERAL, PASSWORD, KEY) if secret in text]
    assert leaks == []


def test_no_option_of_a_recipe_has_the_name_of_a_secret() -> None:
    assert [key for key in keys_of(OmegaConf.structured(RecipeConfig)) if is_secret(key.rpartition(".")[2])] == []


def test_describe_run_gives_mlflow_no_secret(config: RecipeConfig, tmp_path: Path) -> None:
    config.model.path = f"https://me:{PASSWORD}@host/model"
    assert PASSWORD not in str(describe_run(config, RunFolder(tmp_path)))
