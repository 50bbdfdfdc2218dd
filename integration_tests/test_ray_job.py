"""A recipe as a Ray job: on a cluster that is already there, submitted from outside."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from integration_tests.conftest import free_port
from rl_plugins.run_folder import read_metrics

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@dataclass
class HeadNode:
    """Where jobs go, and the environment to reach it with."""

    address: str
    environment: dict[str, str]


@pytest.fixture
def head_node() -> Iterator[HeadNode]:
    """A head node of the test's own, beside whatever Ray there is on this machine."""
    # Sockets live in it, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="head"))
    dashboard = free_port()
    ports = ("port", "ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    command = [
        *RAY, "start", "--head", "--block", "--num-cpus=3", f"--temp-dir={folder}",
        "--include-dashboard=true", f"--dashboard-port={dashboard}", "--object-store-memory=200000000",
        "--disable-usage-stats", *(f"--{name}={free_port()}" for name in ports),
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    # Whether Ray asks for a token depends on what else ran under this user: here it does, and for one made here.
    (folder / "token").write_text(secrets.token_hex(32))
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{dashboard}"
        wait_for_jobs(address, head, folder / "head.log")
        yield HeadNode(address, environment)
    finally:
        # `ray stop` would end every Ray of this machine.
        processes = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes, timeout=30)
        head.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_jobs(address: str, head: subprocess.Popen[bytes], log: Path, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        assert head.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"no job server at {address}:\n{log.read_text()}"
        try:
            with urllib.request.urlopen(f"{address}/api/jobs/", timeout=5):
                return
        except urllib.error.HTTPError as error:
            # It is there, and asks for the token.
            if error.code in (401, 403):
                return
            time.sleep(0.5)
        except OSError:
            time.sleep(0.5)


def test_recipe_runs_as_a_job(head_node: HeadNode, workplace: Path, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    command = [
        *RAY, "job", "submit", "--address", head_node.address, "--working-dir", str(tmp_path / "project"), "--",
        "python", "-m", "rl_plugins.recipes.grpo",
        "run.name=job", f"run.output_dir={tmp_path}/outputs", "run.steps=2", f"model.path={workplace}/tiny",
        f"data.train_files=[{workplace}/data/train.parquet]", f"data.val_files=[{workplace}/data/test.parquet]",
        "data.max_prompt_tokens=26", "sampling.max_tokens=6", "batch.prompts_per_step=4", "batch.samples_per_prompt=4",
        "optimizer.lr=1e-3", "reward.functions.default._target_=integration_tests.rewards.shortness",
    ]  # fmt: skip
    job = subprocess.run(
        command, env=head_node.environment, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL
    )
    assert job.returncode == 0, job.stdout[-6000:] + job.stderr[-2000:]
    assert "succeeded" in job.stdout and "job: 2 RL steps of 4 prompts x 4 samples" in job.stdout
    run = tmp_path / "outputs" / "job"
    series = read_metrics(run / "metrics.jsonl")
    assert list(series["train/loss"]) == [1, 2]
    assert max(series["train/rollout_gap_max"].values()) < 1e-4
    assert (run / "checkpoint_00000002" / "state" / "lightning.ckpt").is_file()
    assert (run / "policy" / "model.safetensors").is_file()
    assert (tmp_path / "outputs" / "mlflow.db").is_file()
