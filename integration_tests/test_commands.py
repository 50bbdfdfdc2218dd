"""`rl-plugins` as a user types it: sampling that is killed and goes on, two policies compared, a model in MLflow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pyarrow.parquet as pq

from rl_plugins.callbacks.mlflow_run import use_store
from rl_plugins.models.tiny import save_tiny_policy

TIMEOUT_S = 240


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "rl_plugins", *map(str, arguments)]


def run(folder: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, env=variables
    )


def test_sampling_with_vllm_goes_on_after_kill(workplace: Path, tmp_path: Path) -> None:
    options = (
        "generate", workplace / "tiny", "--data", workplace / "data" / "test.parquet", "--samples", 8,
        "--max-tokens", 64, "--save-every", 8,
    )  # fmt: skip
    whole = run(tmp_path, *options, "--output", "whole.parquet")
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr == "" and "part 8 of 8" in whole.stdout
    killed = subprocess.Popen(command(*options, "--output", "killed.parquet"), cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "killed.parquet.parts" / "part_00001.parquet").is_file():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait(30)
    assert not (tmp_path / "killed.parquet").exists()
    refused = run(tmp_path, *options, "--output", "killed.parquet", "--temperature", 0.5)
    assert refused.returncode == 2 and "temperature was 1.0 and is now 0.5" in refused.stderr
    resumed = run(tmp_path, *options, "--output", "killed.parquet")
    assert resumed.returncode == 0 and "part 8 of 8" not in resumed.stdout, resumed.stderr
    assert (tmp_path / "killed.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    rows = pq.read_table(tmp_path / "whole.parquet").to_pylist()
    assert len(rows) == 64 and all(len(set(row["responses"])) > 1 for row in rows)


def test_two_policies_are_sampled_and_compared(workplace: Path, tmp_path: Path) -> None:
    """One of them from MLflow; scored by workers of Ray."""
    save_tiny_policy(tmp_path / "other", seed=3)
    use_store(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.create_experiment("models", artifact_location=(tmp_path / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=mlflow.get_experiment_by_name("models").experiment_id) as started:  # type: ignore[union-attr]
        mlflow.log_artifacts(str(tmp_path / "other"), "policy")
    named = f"runs:/{started.info.run_id}/policy"
    done = run(
        tmp_path, "evaluate", workplace / "tiny", named, "--data", workplace / "data" / "test.parquet", "--output",
        "evaluation", "--samples", 2, "--max-tokens", 4, "--engine", "transformers", "--reward",
        "integration_tests.rewards.shortness", "--workers", 1, MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db",
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
