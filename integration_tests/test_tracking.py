"""Results of a run on a team's MLflow server, and the next run from the champion."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from integration_tests.command_server import run_command
from integration_tests.conftest import Recipe
from integration_tests.mlflow_server import Server, best_of
from rl_plugins.addresses import free_port
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.tests.patience import patient, wait_until
from rl_plugins.tracking.registry import Evaluation, register_policy
from rl_plugins.tracking.run import RunDescription, open_run

pytestmark = pytest.mark.extended

# Number of starts of the server, because another process may take the port first.
ATTEMPTS = 3
COMMON = (
    "launcher=local", "rollout.engine=transformers", "run.steps=4", "run.eval_every=2", "run.checkpoint_every=2",
    "batch.prompts_per_step=4", "batch.samples_per_prompt=4", "optimizer.lr=1e-3", "tracking.experiment=team",
    "tracking.register_as=adder", "tracking.traces=2", "run.keep_best=2", "tracking.upload_best=1",
    "reward.functions.default={_target_: integration_tests.rewards.shortness}",
)  # fmt: skip

OPENS_A_STORE = """
import sys
from rl_plugins.tracking.store import import_mlflow, open_client
import_mlflow()
import mlflow.store.tracking.sqlalchemy_store
print("ready", flush=True)
sys.stdin.readline()
open_client(sys.argv[1]).search_experiments()
"""


def test_open_client_of_two_processes_makes_one_sqlite_store(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPENS_A_STORE, f"sqlite:///{tmp_path}/mlflow.db"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("open\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=patient(60))
    assert [process.returncode for process in processes] == [0, 0]


def test_registered_policy_answers_chats_from_mlflow_models_serve(tmp_path: Path) -> None:
    store, folder = f"sqlite:///{tmp_path}/mlflow.db", RunFolder(tmp_path / "run")
    folder.path.mkdir()
    policy = save_tiny_policy(tmp_path / "policy")
    run = open_run(store, "serving", folder, RunDescription())
    register_policy(run, policy, "adder", Evaluation("val/reward", 0.5, "data"), "17+25=")
    with served(tmp_path, {**os.environ, "MLFLOW_TRACKING_URI": store}) as url:
        question = {"messages": [{"role": "user", "content": "17+25="}], "max_tokens": 3}
        request = urllib.request.Request(
            f"{url}/invocations", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=patient(60)) as response:
            (answer,) = json.load(response)
    # Eight tokens with the chat template, six without.
    assert answer["usage"]["prompt_tokens"] == 8 and 0 < answer["usage"]["completion_tokens"] <= 3
    assert answer["choices"][0]["message"]["role"] == "assistant"


@contextmanager
def served(folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Serve the registered policy at an address. The server starts again if another process has taken the port."""
    log = folder / "serve.log"
    for _ in range(ATTEMPTS):
        port = free_port("127.0.0.1")
        url = f"http://127.0.0.1:{port}"
        command = [
            sys.executable, "-m", "mlflow", "models", "serve", "-m", "models:/adder@champion", "--env-manager", "local",
            "--port", str(port), "--workers", "1",
        ]  # fmt: skip
        with log.open("a") as output:
            serving = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            wait_until(lambda: serving.poll() is not None or _is_ready(url), "a served model", 240, log.read_text)  # noqa: B023
            if serving.poll() is None:
                yield url
                return
        finally:
            with suppress(ProcessLookupError):
                os.killpg(serving.pid, signal.SIGKILL)
            serving.wait(patient(30))
    raise AssertionError(log.read_text())


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ping", timeout=patient(5)) as response:
            return response.status == 200
    except OSError:
        return False


def test_server_records_a_run_and_the_next_run_starts_from_the_registered_champion(
    start_recipe: Callable[..., Recipe], server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    first = start_recipe("grpo", "first", *COMMON)
    assert first.wait() == 0, first.tail()
    assert "adder version 1, the champion: the first one" in first.tail()

    client = MlflowClient(server.uri)
    run = client.get_run((first.run / "mlflow_run_id").read_text())
    assert run.info.status == "FINISHED"
    assert run.data.params["batch.prompts_per_step"] == "4" and run.data.params["run.keep_best"] == "2"
    assert "grpo" in run.data.tags["mlflow.source.name"]
    assert run.inputs is not None
    used = {next(tag.value for tag in one.tags): one.dataset for one in run.inputs.dataset_inputs}
    assert used["training"].name == "data/train.parquet" and used["validation"].name == "data/test.parquet"
    files = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert (files / "config.yaml").read_text() == (first.run / "config.yaml").read_text()
    assert (files / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "\ntorch==" in (files / "environment.txt").read_text()
    assert len(json.loads((files / "samples" / "step_00000004.json").read_text())["data"]) == 32
    newest = json.loads((files / "checkpoints" / "step_00000004.json").read_text())
    assert newest["path"] == str(first.run / "checkpoint_00000004") == run.data.tags["checkpoint.path"]
    # The download of a run is a folder. Its best checkpoint can be exported on any machine.
    best = best_of(first.run, "val/reward")
    assert [path.name for path in files.glob("best_*")] == [best.name]
    assert json.loads((files / best.name / "metric.json").read_text()) == json.loads((best / "metric.json").read_text())
    export = [sys.executable, "-m", "rl_plugins", "export", str(files / best.name), str(tmp_path / "exported")]
    run_command(export, cwd=tmp_path, check=True)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert len(client.search_traces(locations=[run.info.experiment_id], run_id=run.info.run_id)) == 8

    second = start_recipe("grpo", "second", *COMMON, "model.path=models:/adder@champion", "tracking.traces=0")
    assert second.wait() == 0, second.tail()
    assert f"models:/adder@champion is {second.folder}/outputs/.models/adder/1" in second.log.read_text()
    start = read_metrics(second.run / "metrics.jsonl")["val/reward"][0]
    assert start == pytest.approx(read_metrics(first.run / "metrics.jsonl")["val/reward"][4])
    assert client.get_model_version("adder", "2").run_id == (second.run / "mlflow_run_id").read_text()
