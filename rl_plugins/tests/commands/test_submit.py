"""`rl-plugins submit` before anything is sent."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_plugins.commands import submit
from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.launch import ray_job

ROOT = Path(__file__).parents[3]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    submit.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "MLFLOW_TRACKING_URI", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--", "grpo", "run.name=a b"], "python -m rl_plugins.recipes.grpo 'run.name=a b'"),
        (["--no-wait", "--", "python", "-m", "mine", "--flag"], "python -m mine --flag"),
        (["sft_rm_ppo", "resume=true"], "python -m rl_plugins.recipes.sft_rm_ppo resume=true"),
    ],
)
def test_a_recipe_is_a_module_and_other_commands_stay(words, command):
    assert submit.job_command(parse(*words).command) == command


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "no command"), (["--", "gropo", "a=1"], "did you mean grpo"), (["zzz"], "recipes: grpo")],
)
def test_a_wrong_command_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        submit.job_command(parse(*words).command)


def test_the_address_is_the_option_then_the_environment_then_this_machine(monkeypatch):
    assert submit.job_server(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265/")
    assert submit.job_server(None) == "http://head:8265"
    assert submit.job_server("https://other") == "https://other"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=head:6379.*--address http"):
        submit.job_server(None)


def test_variables_are_passed_on_by_name_and_stores_in_files_are_not(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    monkeypatch.setenv("TOKEN", "secret")
    assert submit.job_environment(["TOKEN", "A=b=c"]) == {
        "MLFLOW_TRACKING_URI": "http://tracking", "TOKEN": "secret", "A": "b=c",
    }  # fmt: skip
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///here.db")
    assert submit.job_environment([]) == {}
    with pytest.raises(ConfigError, match="--env MISSING: it is not set"):
        submit.job_environment(["MISSING"])


def test_an_address_where_nobody_answers_is_named(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"no Ray job server at {address}.*--address"):
        submit.run(parse("--folder", str(tmp_path), "--address", address, "--", "grpo"))


def test_a_server_that_is_silent_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_job, "CONNECT_TIMEOUT_S", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        started = time.monotonic()
        with pytest.raises(ConfigError, match=r"did not answer in 0\.5 s"):
            ray_job.connect(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert time.monotonic() - started < 5


class Guarded(BaseHTTPRequestHandler):
    """A server that wants a token."""

    def do_GET(self) -> None:
        self.send_error(401, "Unauthorized: Missing authentication token")

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def test_a_server_that_wants_a_token_is_told_of_in_one_line():
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError) as refused:
            ray_job.connect(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert "set RAY_AUTH_MODE=token" in str(refused.value) and "\n" not in str(refused.value)


def test_what_a_job_said_is_not_said_again(capsys):
    said = "Job entrypoint command failed with exit code 2, last available logs (truncated to 20,000 chars):\nerror: no"
    details: Any = SimpleNamespace(status="FAILED", message=said, driver_exit_code=2)
    assert ray_job._exit_code("job_1", details, stopping=False) == 2
    assert capsys.readouterr().err == "job_1 failed: Job entrypoint command failed with exit code 2\n"


def test_an_error_of_a_call_is_that_of_the_caller():
    with pytest.raises(ZeroDivisionError):
        ray_job.within(5, "a division", lambda: 1 // 0)
    with pytest.raises(DeadlineExceeded, match="a nap did not answer"):
        ray_job.within(0.01, "a nap", lambda: time.sleep(0.2))


def test_a_dry_run_loads_neither_ray_nor_torch():
    code = (
        "import argparse, sys; from rl_plugins.commands import submit; parser = argparse.ArgumentParser();"
        "submit.add_arguments(parser); submit.run(parser.parse_args(['--dry-run', '--', 'grpo']));"
        "assert not {'ray', 'torch', 'vllm'} & set(sys.modules)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-1].endswith("for: python -m rl_plugins.recipes.grpo")
