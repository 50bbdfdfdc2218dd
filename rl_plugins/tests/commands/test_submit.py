"""`rl-plugins submit`: the command, the server and the environment of the job, and calls with a deadline."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import requests

from rl_plugins.commands import submit
from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.tests.patience import patient

ROOT = Path(__file__).parents[3]


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    submit.add_arguments(parser)
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "MLFLOW_TRACKING_URI", "HF_ENDPOINT", *submit._SECRETS):
        # Removed again after the test, even if the test sets the variable.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--", "grpo", "run.name=a b"], "python -m rl_plugins.recipes.grpo 'run.name=a b'"),
        (["--no-wait", "--", "python", "-m", "mine", "--flag"], "python -m mine --flag"),
        (["sft_rm_ppo", "resume=true"], "python -m rl_plugins.recipes.sft_rm_ppo resume=true"),
        (["--", "recipe.yaml", "run.steps=3"], "python -m rl_plugins recipe.yaml run.steps=3"),
    ],
)
def test_job_command_of_a_recipe_runs_the_module(words, command):
    assert submit.job_command(parse(*words).command) == command


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "no command"), (["--", "gropo", "a=1"], "did you mean grpo"), (["zzz"], "recipes: grpo")],
)
def test_job_command_refuses_an_unknown_command(words, message):
    with pytest.raises(ConfigError, match=message):
        submit.job_command(parse(*words).command)


def test_job_command_keeps_expressions_and_refuses_secrets():
    expression = "+reward.functions.judge.api_key=${oc.env:KEY}"
    assert submit.job_command(["grpo", expression]).endswith(f"grpo '{expression}'")
    for words in (
        ["grpo", "+reward.functions.judge.api_key=sk-1"],
        ["grpo", "tracking.uri=http://me:sk-1@host"],
        ["python", "-m", "train", "--api-key", "sk-1"],
    ):
        with pytest.raises(ConfigError, match=r"the command has a secret.*--env NAME.*\$\{oc\.env:NAME\}") as error:
            submit.job_command(words)
        assert "sk-1" not in str(error.value)


WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "3600"}
"""Ray waits for the step of a stopped run."""


def test_job_environment_has_addresses_without_passwords(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:word@host:5000")
    assert submit.job_environment([]) == {"MLFLOW_TRACKING_URI": "http://host:5000", **WAIT}
    assert submit.job_environment(["MLFLOW_TRACKING_URI"]) == {
        "MLFLOW_TRACKING_URI": "http://me:word@host:5000", **WAIT,
    }  # fmt: skip


def test_submit_names_files_with_secrets_that_are_left_out(tmp_path, capsys):
    for name in ("train.py", ".env"):
        (tmp_path / name).touch()
    assert submit.run(parse("--dry-run", "--folder", str(tmp_path), "--", "grpo")) == 0
    shown = capsys.readouterr()
    assert "left out, as files with secrets: .env (--include PATH" in shown.err
    assert shown.out.startswith("0.0 MiB train.py\n1 files of")


def test_submit_names_variables_with_secrets_that_are_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "reward.py").write_text("")
    for name in ("MLFLOW_TRACKING_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    assert submit.run(parse("--dry-run", "--folder", str(tmp_path), "--env", "HF_TOKEN", "--", "grpo")) == 0
    assert "not sent, as secrets: MLFLOW_TRACKING_TOKEN (--env NAME sends one)\n" in capsys.readouterr().err


def test_job_server_is_the_option_or_the_environment_or_this_machine(monkeypatch):
    assert submit.job_server(None) == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265/")
    assert submit.job_server(None) == "http://head:8265"
    assert submit.job_server("https://other") == "https://other"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=head:6379.*--address http"):
        submit.job_server(None)


def test_job_environment_has_variables_by_name_and_no_store_in_a_file(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking")
    monkeypatch.setenv("TOKEN", "secret")
    assert submit.job_environment(["TOKEN", "A=b=c"]) == {
        "MLFLOW_TRACKING_URI": "http://tracking", "TOKEN": "secret", "A": "b=c", **WAIT,
    }  # fmt: skip
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///here.db")
    assert submit.job_environment([]) == WAIT
    assert submit.job_environment(["RAY_JOB_STOP_WAIT_TIME_S=9"]) == {"RAY_JOB_STOP_WAIT_TIME_S": "9"}
    with pytest.raises(ConfigError, match="--env MISSING: it is not set"):
        submit.job_environment(["MISSING"])


def test_submit_names_an_address_that_does_not_answer(tmp_path, refused_address):
    address = f"http://{refused_address}"
    with pytest.raises(ConfigError, match=f"no Ray job server at {address}.*--address"):
        submit.run(parse("--folder", str(tmp_path), "--address", address, "--", "grpo"))


def test_connect_prefers_the_address_to_the_unchanged_variables_of_ray(monkeypatch, refused_address):
    monkeypatch.setenv("RAY_ADDRESS", "http://other:8265")
    with pytest.raises(ConfigError, match=f"no Ray job server at http://{refused_address} .*{refused_address}"):
        submit.connect(f"http://{refused_address}")
    assert "RAY_API_SERVER_ADDRESS" not in os.environ
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://another:8265")
    with pytest.raises(ConfigError, match=f"no Ray job server at http://{refused_address} .*{refused_address}"):
        submit.connect(f"http://{refused_address}")
    assert os.environ["RAY_API_SERVER_ADDRESS"] == "http://another:8265"


def test_connect_raises_after_the_deadline_for_a_silent_server(monkeypatch):
    monkeypatch.setattr(submit, "CONNECT_TIMEOUT_S", 0.05)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ConfigError, match=r"did not answer in 0\.05 s"):
            submit.connect(f"http://127.0.0.1:{listener.getsockname()[1]}")


class Guarded(BaseHTTPRequestHandler):
    """A server with a required token."""

    def do_GET(self) -> None:
        self.send_error(401, "Unauthorized: Missing authentication token")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_connect_raises_one_line_if_the_server_requires_a_token(monkeypatch):
    monkeypatch.setattr(submit, "CONNECT_TIMEOUT_S", patient(60))
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(ConfigError) as refused:
            submit.connect(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert "set RAY_AUTH_MODE=token" in str(refused.value) and "\n" not in str(refused.value)


def test_exit_code_of_a_failed_job_leaves_the_log_of_the_job_out(capsys):
    said = "Job entrypoint command failed with exit code 2, last available logs (truncated to 20,000 chars):\nerror: no"
    details: Any = SimpleNamespace(status="FAILED", message=said, driver_exit_code=2)
    assert submit._exit_code("job_1", details, stopping=False) == 2
    assert capsys.readouterr().err == "job_1 failed: Job entrypoint command failed with exit code 2\n"


def test_follow_job_names_a_stop_that_the_server_does_not_take(monkeypatch, capsys):
    ended = SimpleNamespace(status="FAILED", message="killed", driver_exit_code=3)
    monkeypatch.setattr(submit, "_print_logs", lambda client, job: None)
    for error in requests.ConnectionError("gone"), DeadlineExceeded("no answer"), RuntimeError("status code 500"):
        monkeypatch.setattr(submit, "_wait_for_end", mock.Mock(side_effect=[KeyboardInterrupt, ended]))
        client: Any = SimpleNamespace(stop_job=mock.Mock(side_effect=error))
        assert submit.follow_job(client, "job_1") == 3
        assert f"the job server does not stop job_1 ({error}): use ray job stop job_1" in capsys.readouterr().err


def test_follow_job_waits_while_a_proxy_answers_for_the_job_server(monkeypatch):
    monkeypatch.setattr(submit, "_print_logs", lambda client, job: None)
    monkeypatch.setattr(submit, "_POLL_S", 0.0)
    status = SimpleNamespace(is_terminal=lambda: True)
    ended = SimpleNamespace(status=status, message="killed", driver_exit_code=3)
    busy = RuntimeError("Request failed with status code 502: Bad Gateway")
    client: Any = SimpleNamespace(get_job_info=mock.Mock(side_effect=[busy, busy, ended]))
    assert submit.follow_job(client, "job_1") == 3


def starting_cluster(*answers: str | Exception) -> Any:
    """Return the client of a cluster whose agents start late."""
    return SimpleNamespace(submit_job=mock.Mock(side_effect=answers))


def test_submit_job_waits_for_the_agents_of_a_cluster_that_has_just_started(monkeypatch):
    monkeypatch.setattr(submit, "_POLL_S", 0.0)
    late = RuntimeError(
        "Request failed with status code 500: No available agent to submit job, please try again later."
    )
    assert submit.submit_job(starting_cluster(late, late, "raysubmit_1"), "true", {}) == "raysubmit_1"
    with pytest.raises(ConfigError, match=r"the job server does not take the project \(reset\): repeat the command"):
        submit.submit_job(starting_cluster(requests.ConnectionError("reset")), "true", {})
    monkeypatch.setattr(submit, "_START_S", -1.0)
    with pytest.raises(ConfigError, match=r"refuses the job: .*No available agent"):
        submit.submit_job(starting_cluster(late), "true", {})
    with pytest.raises(ConfigError, match="refuses the job: no working folder"):
        submit.submit_job(starting_cluster(RuntimeError("no working folder")), "true", {})


def test_within_raises_the_error_of_the_call():
    with pytest.raises(ZeroDivisionError):
        submit.within(patient(60), "a division", lambda: 1 // 0)


def test_within_raises_after_the_deadline():
    never = threading.Event()
    with pytest.raises(DeadlineExceeded, match="an event did not answer"):
        submit.within(0.01, "an event", never.wait)
    # Lets the thread of the call end.
    never.set()


def test_submit_dry_run_loads_neither_ray_nor_torch():
    code = (
        "import argparse, sys; from rl_plugins.commands import submit; parser = argparse.ArgumentParser();"
        "submit.add_arguments(parser); submit.run(parser.parse_args(['--dry-run', '--', 'grpo']));"
        "assert not {'ray', 'torch', 'vllm'} & set(sys.modules)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines()[-1].endswith("for: python -m rl_plugins.recipes.grpo")
