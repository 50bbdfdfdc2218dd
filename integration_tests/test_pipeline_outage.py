"""A tracking server is lost between the end of a stage and the next: the pipeline goes on, and nothing is lost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from mlflow.entities import Run

from integration_tests.command_server import run_command, start_command
from integration_tests.conftest import Recipe
from integration_tests.mlflow_server import Server
from integration_tests.pace import Pace
from rl_plugins.run_folder import read_metrics

pytestmark = pytest.mark.extended

STAGES = ("first", "second")
PIPELINE = (
    "import sys; from omegaconf import OmegaConf; from rl_plugins.launch.pipeline import run_pipeline\n"
    "run_pipeline(OmegaConf.load(sys.argv[1]))"
)


def stage(pace: Pace, workplace: Path) -> dict[str, Any]:
    """Return the configuration of a stage that waits in its first validation."""
    paced = {"_target_": "integration_tests.rewards.paced", "pace": str(pace.file)}
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
            "reward": {"functions": {"default": paced}, "deadline_s": 3600},
            "model": {"path": f"{workplace}/tiny"},
        },
    }


@pytest.mark.parametrize("back", ["for the last stage", "after the end"])
def test_pipeline_goes_on_when_the_server_is_away_between_two_stages(
    server: Server, workplace: Path, tmp_path: Path, back: str
) -> None:
    # A validation has 64 rows.
    paces = {name: Pace(tmp_path / f"{name}.pace", samples=64) for name in STAGES}
    for pace in paces.values():
        pace.allow(0)
    config = {
        "name": "pipeline", "output_dir": str(tmp_path), "model": f"{workplace}/tiny", "tracking_uri": server.uri,
        "experiment": back, "resume": False, "folder": f"{tmp_path}/pipeline", "data": {}, "common": {},
        "stages": {name: stage(pace, workplace) for name, pace in paces.items()},
    }  # fmt: skip
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(config))
    log, folder = tmp_path / "log", tmp_path / "pipeline"
    with log.open("w") as output:
        command = [sys.executable, "-c", PIPELINE, str(tmp_path / "given.yaml")]
        process = start_command(command, cwd=tmp_path, stdout=output, stderr=output)
    pipeline = Recipe(tmp_path, process, log, "pipeline")
    try:
        paces["first"].wait(pipeline)
        pipeline.wait_until((folder / "first" / "mlflow_run_id").is_file, "an MLflow run of the first stage")
        server.cut_off()
        paces["first"].allow_all()
        paces["second"].wait(pipeline)
        if back == "for the last stage":
            server.start()
        paces["second"].allow_all()
        assert pipeline.wait() == 0, pipeline.tail()
    finally:
        process.kill()
    if back == "after the end":
        assert f"rl-plugins sync {folder} sends what is missing" in log.read_text()
        server.start()
        run_command([sys.executable, "-m", "rl_plugins", "sync", str(folder)], cwd=tmp_path, check=True)
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
