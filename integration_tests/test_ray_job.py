"""A recipe as a Ray job: submitted from outside to a running cluster, stopped and resumed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from integration_tests.conftest import Recipe
from integration_tests.fork_server import take_signals
from integration_tests.ray_workers import descendants
from rl_plugins.addresses import free_port
from rl_plugins.run_folder import RunFolder, checkpoint_step, read_metrics
from rl_plugins.tests.patience import patient, wait_until

pytestmark = pytest.mark.extended

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Number of starts of the head node, because another process may take one of the ports first.
ATTEMPTS = 3
SUBMIT = [sys.executable, "-m", "rl_plugins", "submit"]
# The project's reward: a job finds the reward only in a copy of the project.
REWARD = """
def shortness(solution_str):
    return 1.0 - sum(character.isalpha() for character in solution_str) / 8
"""


@dataclass
class HeadNode:
    """Address of the job server, and the environment for requests to the server."""

    address: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def head_node() -> Iterator[HeadNode]:
    """A head node for the tests, beside any other Ray on this machine."""
    # This folder contains sockets, and paths of sockets must be short.
    folder = Path(tempfile.mkdtemp(prefix="head"))
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    # Other Ray programs of this user decide if Ray asks for a token. Here Ray always asks, for a token made here.
    (folder / "token").write_text(secrets.token_hex(32))
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    log = folder / "head.log"
    for _ in range(ATTEMPTS):
        head, address = start_head(folder, log, environment)
        try:
            wait_until(lambda: head.poll() is not None or answers(address), f"jobs at {address}", 240, log.read_text)  # noqa: B023
            if head.poll() is None:
                yield HeadNode(address, environment)
                break
        finally:
            kill_with_children(head)
    else:
        raise AssertionError(log.read_text())
    shutil.rmtree(folder, ignore_errors=True)


def start_head(folder: Path, log: Path, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], str]:
    """Start a head node; return the process and the address. The process ends if another process has a port."""
    dashboard = free_port("127.0.0.1")
    ports = ("ray-client-server-port", "dashboard-agent-listen-port")
    command = [
        *RAY, "start", "--head", "--block", "--num-cpus=3", f"--temp-dir={folder}", "--port=0",
        "--include-dashboard=true", f"--dashboard-port={dashboard}", "--object-store-memory=200000000",
        "--disable-usage-stats", *(f"--{name}={free_port('127.0.0.1')}" for name in ports),
    ]  # fmt: skip
    with log.open("a") as output:
        head = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    return head, f"http://127.0.0.1:{dashboard}"


def answers(address: str) -> bool:
    """Return True if a job server listens and asks for a token."""
    try:
        with urllib.request.urlopen(f"{address}/api/jobs/", timeout=patient(5)):
            return True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except OSError:
        return False


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill with SIGKILL, because `ray stop` would end every Ray on this machine."""
    with suppress(psutil.NoSuchProcess):
        found = [*descendants(process.pid), psutil.Process(process.pid)]
        for one in found:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(found, timeout=patient(30))
    process.wait(patient(30))


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
        "reward.functions.default._target_=my_rewards.shortness", "rollout.engine=transformers",
        "placement.num_workers=1", *overrides,
    ]  # fmt: skip


def test_submitted_job_is_stopped_by_ctrl_c_and_resumed_as_a_ray_job(
    head_node: HeadNode, project: Path, workplace: Path, tmp_path: Path
) -> None:
    overrides = recipe(workplace, f"run.output_dir={tmp_path}/outputs")
    run = RunFolder(tmp_path / "outputs" / "job")
    command = [*SUBMIT, "--address", head_node.address, "--", "grpo", *overrides]
    log = tmp_path / "submit.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "run.steps=100000"],
            cwd=project, env=head_node.environment, stdout=output, stderr=output, text=True,
            preexec_fn=take_signals,
        )  # fmt: skip
    submitted = Recipe(tmp_path, process, log, "job")
    submitted.wait_until(lambda: run.latest_checkpoint() is not None, "a checkpoint")
    process.send_signal(signal.SIGINT)
    assert submitted.wait() == 130, submitted.tail()
    said = log.read_text()
    assert "1 files, 0.0 MiB" in said and "job: 100000 RL steps of 4 prompts x 4 samples" in said
    assert "stopping raysubmit_" in said and said.splitlines()[-1].endswith("was stopped")

    stopped = run.latest_checkpoint()
    assert stopped is not None
    done = checkpoint_step(stopped)
    command = [*RAY, "job", "submit", "--address", head_node.address, "--working-dir", str(project), "--"]
    job = subprocess.run(
        [*command, "python", "-m", "rl_plugins.recipes.grpo", *overrides, f"run.steps={done + 2}", "run.resume=true"],
        env=head_node.environment, capture_output=True, text=True, timeout=patient(400), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout[-6000:] + job.stderr[-2000:]
    assert "succeeded" in job.stdout and f"job: continuing from {stopped}" in job.stdout
    series = read_metrics(run.metrics)
    assert list(series["train/loss"]) == list(range(1, done + 3))
    assert max(series["train/rollout_gap_max"].values()) < 1e-4
    assert (run.checkpoint(done + 2) / "state" / "lightning.ckpt").is_file()
    assert (run.export / "model.safetensors").is_file()
    assert (tmp_path / "outputs" / "mlflow.db").is_file()


def test_submit_returns_exit_code_and_output_of_a_failed_job(
    head_node: HeadNode, project: Path, workplace: Path
) -> None:
    job = subprocess.run(
        [*SUBMIT, "--address", head_node.address, "--", "grpo", *recipe(workplace)],
        cwd=project, env=head_node.environment, capture_output=True, text=True, timeout=patient(240),
    )  # fmt: skip
    assert job.returncode == 2, job.stdout + job.stderr
    # In a job, a relative folder is in a folder removed after the job.
    assert "error: run.output_dir=" in job.stdout and "give an absolute path" in job.stdout
