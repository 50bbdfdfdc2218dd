"""`rl-plugins generate`, `evaluate` and `init`: a killed command resumes, policies are compared, a project trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from mlflow import MlflowClient
from safetensors.torch import load_file

from integration_tests.command_server import run_command
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import metric_rows
from rl_plugins.tests.patience import patient

# The process ends between two parts, as by `kill -9`, without a race.
KILLED_BEFORE_THE_THIRD_PART = """
import os, signal
from rl_plugins.commands.main import main
from rl_plugins.evaluation.generation import SampleFile

write_part = SampleFile.write_part

def killed(samples, number, table):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write_part(samples, number, table)

SampleFile.write_part = killed
main()
"""


def run(
    folder: Path, *arguments: object, code: str | None = None, new_interpreter: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `rl-plugins` with arguments, or run code instead."""
    command = [sys.executable, *(("-m", "rl_plugins") if code is None else ("-c", code)), *map(str, arguments)]
    env = {**os.environ, **environment}
    if new_interpreter:
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=patient(240))
    return run_command(command, cwd=folder, env=env)


@pytest.mark.extended
def test_generate_with_vllm_resumes_after_kill(workplace: Path, tmp_path: Path) -> None:
    options = (
        "generate", workplace / "tiny", "--data", workplace / "data" / "test.parquet", "--samples", 8,
        "--max-tokens", 64, "--save-every", 8,
    )  # fmt: skip
    # Start messages of libraries are silenced before the import.
    whole = run(tmp_path, *options, "--output", "whole.parquet", new_interpreter=True)
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr == "" and "part 8 of 8" in whole.stdout
    killed = run(tmp_path, *options, "--output", "killed.parquet", code=KILLED_BEFORE_THE_THIRD_PART)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "killed.parquet.parts" / "part_00001.parquet").is_file()
    assert not (tmp_path / "killed.parquet").exists()
    refused = run(tmp_path, *options, "--output", "killed.parquet", "--temperature", 0.5)
    assert refused.returncode == 2 and "temperature was 1.0 and is now 0.5" in refused.stderr
    resumed = run(tmp_path, *options, "--output", "killed.parquet")
    assert resumed.returncode == 0 and "part 6 of 6" in resumed.stdout, resumed.stderr
    assert (tmp_path / "killed.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    rows = pq.read_table(tmp_path / "whole.parquet").to_pylist()
    assert len(rows) == 64 and all(len(set(row["responses"])) > 1 for row in rows)


@pytest.mark.extended
def test_evaluate_holds_conversations_of_a_recipe_with_vllm(workplace: Path, tmp_path: Path) -> None:
    recipe = {
        "stage": "policy_optimization",
        "model": {"path": str(workplace / "tiny")},
        "run": {"name": "talk"},
        "data": {"max_prompt_tokens": 40},
        # The policy almost never ends a response.
        "sampling": {"stop": list("abcdefghijklmnopqrstuvwxyz")},
        "environment": {"stateful": "rl_plugins.tests.environments.sample_environments.Lengths", "max_turns": 3},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(recipe))
    done = run(
        tmp_path, "evaluate", workplace / "tiny", "--data", workplace / "data" / "test.parquet", "--output",
        "evaluation", "--recipe", "config.yaml", "--samples", 2, "--max-tokens", 48, "--save-every", 32,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "evaluation").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == 64 and max(max(row["turns"]) for row in rows) == 3
    for row in rows:
        for text, score in zip(row["conversations"], row["scores"], strict=True):
            said = [message["content"] for message in json.loads(text) if message["role"] == "assistant"]
            assert score == sum(1.0 + len(response) for response in said)
    (result,) = (tmp_path / "evaluation").glob("*.evaluation.json")
    mean = sum(sum(row["scores"]) for row in rows) / 128
    assert json.loads(result.read_text())["measures"]["addition"]["mean@2"]["value"] == pytest.approx(mean)


def test_evaluate_samples_and_compares_two_policies(workplace: Path, tmp_path: Path) -> None:
    """One policy is in MLflow; workers of Ray score."""
    save_tiny_policy(tmp_path / "other", seed=3)
    store = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(store)
    experiment = client.create_experiment("models", artifact_location=(tmp_path / "artifacts").as_uri())
    run_id = client.create_run(experiment).info.run_id
    client.log_artifacts(run_id, str(tmp_path / "other"), "policy")
    done = run(
        tmp_path, "evaluate", workplace / "tiny", f"runs:/{run_id}/policy", "--output", "evaluation",
        "--data", workplace / "data" / "test.parquet", "--samples", 2, "--max-tokens", 4, "--engine", "transformers",
        "--reward", "integration_tests.rewards.shortness", "--workers", 1, MLFLOW_TRACKING_URI=store,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{workplace / 'tiny'}" in done.stdout and "95 % interval" in done.stdout
    files = sorted((tmp_path / "evaluation").glob("*.evaluation.json"))
    assert len(files) == 2
    contents = [json.loads(file.read_text()) for file in files]
    (second,) = (content for content in contents if "against" in content)
    assert all(set(content["measures"]["addition"]) >= {"mean@2", "best@2", "maj@2", "pass@1"} for content in contents)
    difference = second["against"]["difference"]["mean"]
    means = {content is second: content["measures"]["addition"]["mean@2"]["value"] for content in contents}
    assert abs(difference["value"] - (means[True] - means[False])) < 1e-9
    assert difference["low"] <= difference["value"] <= difference["high"] and difference["prompts"] == 64


@pytest.mark.extended
def test_project_of_init_passes_the_written_test_and_trains(tmp_path: Path) -> None:
    """Type the commands printed by `rl-plugins init`, with fewer steps."""
    made = run(tmp_path, "init", "projects/solver")
    assert made.returncode == 0, made.stderr
    change_folder, *commands = [line.split() for line in made.stdout.splitlines() if line.startswith("  ")]
    assert change_folder == ["cd", "projects/solver"]
    folder = tmp_path / "projects" / "solver"
    printed = {}
    for words in commands:
        program, *arguments = words[2:] if words[:2] == ["python", "-m"] else words
        module = {"rl-plugins": "rl_plugins"}.get(program, program)
        options = ["run.steps=3", "run.eval_every=3"] if arguments == ["recipe.yaml"] else []
        done = run_command([sys.executable, "-m", module, *arguments, *options], cwd=folder, check=True)
        printed[arguments[0]] = done.stdout
    assert list(printed) == ["test_reward.py", "recipe.yaml", "show"]
    assert "1 passed" in printed["test_reward.py"]
    rows = [row for row in metric_rows(folder / "outputs" / "first" / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    # Two digits in place of letters have a score.
    assert max(row["train/reward"] for row in rows) > 0 and min(row["train/gradient_norm"] for row in rows) > 0
    before, after = (
        load_file(path / "model.safetensors") for path in (folder / "model", folder / "outputs" / "first" / "policy")
    )
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert "train/reward" in printed["show"]
