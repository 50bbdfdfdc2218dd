"""A recipe as a Ray job: on a cluster that is already there, submitted from outside, stopped and resumed."""

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
from rl_plugins.run_folder import RunFolder, checkpoint_step, read_metrics

pytestmark = pytest.mark.extended

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SUBMIT = [sys.executable, "-m", "rl_plugins", "submit"]
# The project's own reward: a job finds it only if the project was sent.
REWARD = """
def shortness(solution_str):
    return 1.0 - sum(character.isalpha() for character in solution_str) / 8
"""


@dataclass
class HeadNode:
    """Where jobs go, and the environment to reach it with."""

    address: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "outputs").mkdir(parents=True)
    (folder / "my_rewards.py").write_text(REWARD)
    (folder / "outputs" / "large.txt").write_text("x" * 2**20)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def recipe(workplace: Path, *overrides: str) -> list[str]:
    return [
        "run.name=job", f"model.path={workplace}/tiny", f"data.train_files=[{workplace}/data/train.parquet]",
        f"data.val_files=[{workplace}/data/test.parquet]", "data.max_prompt_tokens=26", "sampling.max_tokens=6",
        "batch.prompts_per_step=4", "batch.samples_per_prompt=4", "optimizer.lr=1e-3", "run.checkpoint_every=1",
        "reward.functions.default._target_=my_rewards.shortness", *overrides,
    ]  # fmt: skip


def test_a_job_that_ctrl_c_stops_goes_on_as_a_plain_ray_job(
    head_node: HeadNode, project: Path, workplace: Path, tmp_path: Path
) -> None:
    overrides = recipe(workplace, f"run.output_dir={tmp_path}/outputs")
    run = RunFolder(tmp_path / "outputs" / "job")
    command = [*SUBMIT, "--address", head_node.address, "--", "grpo", *overrides]
    with (tmp_path / "submit.log").open("w") as log:
        submitted = subprocess.Popen(
            [*command, "run.steps=1000", "rollout.engine=transformers"],
            cwd=project, env=head_node.environment, stdout=log, stderr=subprocess.STDOUT,
            # A shell that started the tests in the background ignores it, and they would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
    deadline = time.monotonic() + 200
    while run.latest_checkpoint() is None:
        assert submitted.poll() is None and time.monotonic() < deadline, (tmp_path / "submit.log").read_text()
        time.sleep(0.2)
    submitted.send_signal(signal.SIGINT)
    assert submitted.wait(60) == 130, (tmp_path / "submit.log").read_text()
    said = (tmp_path / "submit.log").read_text()
    assert "1 files, 0.0 MiB" in said and "job: 1000 RL steps of 4 prompts x 4 samples" in said
    assert "stopping raysubmit_" in said and said.splitlines()[-1].endswith("was stopped")

    stopped = run.latest_checkpoint()
    assert stopped is not None
    done = checkpoint_step(stopped)
    command = [*RAY, "job", "submit", "--address", head_node.address, "--working-dir", str(project), "--"]
    job = subprocess.run(
        [*command, "python", "-m", "rl_plugins.recipes.grpo", *overrides, f"run.steps={done + 2}", "run.resume=true"],
        env=head_node.environment, capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-6000:] + job.stderr[-2000:]
    assert "succeeded" in job.stdout and f"job: continuing from {stopped}" in job.stdout
    series = read_metrics(run.metrics)
    assert list(series["train/loss"]) == list(range(1, done + 3))
    assert max(series["train/rollout_gap_max"].values()) < 1e-4
    assert (run.checkpoint(done + 2) / "state" / "lightning.ckpt").is_file()
    assert (run.export / "model.safetensors").is_file()
    assert (tmp_path / "outputs" / "mlflow.db").is_file()


def test_a_job_that_fails_gives_its_exit_code_and_its_words(
    head_node: HeadNode, project: Path, workplace: Path
) -> None:
    job = subprocess.run(
        [*SUBMIT, "--address", head_node.address, "--", "grpo", *recipe(workplace)],
        cwd=project, env=head_node.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert job.returncode == 2, job.stdout + job.stderr
    # In a job, a relative folder is one that goes away with it.
    assert "error: run.output_dir=" in job.stdout and "give an absolute path" in job.stdout
