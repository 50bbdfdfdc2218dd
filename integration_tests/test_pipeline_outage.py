"""A tracking server that goes away while one stage ends and the next begins: the pipeline goes on, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run

from integration_tests.mlflow_server import Server
from rl_plugins.run_folder import read_metrics

pytestmark = pytest.mark.extended

STAGES = ("first", "second")
PIPELINE = (
    "import sys; from omegaconf import OmegaConf; from rl_plugins.launch.pipeline import run_pipeline\n"
    "run_pipeline(OmegaConf.load(sys.argv[1]))"
)


def stage(folder: Path, name: str, workplace: Path) -> dict[str, Any]:
    """Waits in its validations while there is a file of its name."""
    held = {"_target_": "integration_tests.rewards.held", "gate": str(folder / f"{name}.gate")}
    return {
        "recipe": "sft",
        "options": {
            "launcher": "local",
            "rollout": {"engine": "transformers"},
            "run": {"steps": 4, "eval_every": 2, "eval_before": False},
            "data": {
                "train_files": [f"{workplace}/data/train.parquet"],
                "val_files": [f"{workplace}/data/test.parquet"],
                "max_prompt_tokens": 26,
            },
            "batch": {"prompts_per_step": 8},
            "sampling": {"max_tokens": 6},
            "reward": {"functions": {"default": held}, "deadline_s": 120},
            "model": {"path": f"{workplace}/tiny"},
        },
    }


@pytest.mark.parametrize("back", ["for the last stage", "after the end"])
def test_an_outage_between_two_stages(server: Server, workplace: Path, tmp_path: Path, back: str) -> None:
    config = {
        "name": "pipeline", "output_dir": str(tmp_path), "model": f"{workplace}/tiny", "tracking_uri": server.uri,
        "experiment": back, "resume": False, "folder": f"{tmp_path}/pipeline", "data": {}, "common": {},
        "stages": {name: stage(tmp_path, name, workplace) for name in STAGES},
    }  # fmt: skip
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    log, folder = tmp_path / "log", tmp_path / "pipeline"
    command = [sys.executable, "-c", PIPELINE, str(tmp_path / "given.yaml")]
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=output, stderr=subprocess.STDOUT, env=os.environ)
    try:
        # Once a stage is checked, with its reward, it takes seconds until it validates.
        wait_for(lambda: (folder / "first" / "config.yaml").is_file(), process, log)
        (tmp_path / "first.gate").touch()
        wait_for(lambda: (folder / "first" / "mlflow_run_id").is_file(), process, log)
        server.kill()
        (tmp_path / "first.gate").unlink()
        wait_for(lambda: (folder / "second" / "config.yaml").is_file(), process, log)
        (tmp_path / "second.gate").touch()
        if back == "for the last stage":
            server.start()
        (tmp_path / "second.gate").unlink()
        assert process.wait(180) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
    if back == "after the end":
        assert f"rl-plugins sync {folder} sends what is missing" in log.read_text()
        server.start()
        sync = subprocess.run([sys.executable, "-m", "rl_plugins", "sync", str(folder)], capture_output=True, text=True)
        assert sync.returncode == 0, sync.stdout + sync.stderr
    runs = runs_of(server, back)
    parent = runs.pop("pipeline")
    assert parent.info.run_id == (folder / "mlflow_run_id").read_text()
    assert set(parent.data.metrics) == {f"{name}/val/reward" for name in STAGES}
    assert set(runs) == set(STAGES)
    assert all(run.data.tags["mlflow.parentRunId"] == parent.info.run_id for run in runs.values())
    assert all(run.info.status == "FINISHED" for run in (parent, *runs.values()))
    client = MlflowClient(server.store)
    for name, run in runs.items():
        for metric, values in read_metrics(folder / name / "metrics.jsonl").items():
            history = client.get_metric_history(run.info.run_id, metric)
            assert {point.step: point.value for point in history} == values and len(history) == len(values)


def runs_of(server: Server, experiment: str) -> dict[str, Run]:
    client = MlflowClient(server.store)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return {str(run.info.run_name): run for run in client.search_runs([found.experiment_id])}


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float = 120
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
