"""Run a recipe as a Ray job: send the project, print the output of the job, and return the job's exit code.

The command sends files of the current folder: tracked files, and new files that git does not ignore. It never sends
.git, environments, data, outputs and checkpoints, and no files with secrets, such as .env and private keys, unless
--include has the whole path of the file. Paths in the job's command are paths on the cluster. Nothing is
installed on the cluster: the machines have the environment already. Ctrl-C stops the job; `run.resume=auto` continues
from the last checkpoint.

  rl-plugins submit -- grpo model.path=/shared/model 'data.train_files=[/shared/train.parquet]' \\
      run.output_dir=/shared/outputs run.name=first
  rl-plugins submit --address http://head:8265 --env HF_TOKEN -- grpo run.name=first run.resume=auto ...
  rl-plugins submit --no-wait -- python -m my_project.train --epochs 3
  rl-plugins submit --dry-run -- grpo ...
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import logging
import multiprocessing
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlparse

from rl_plugins.commands.main import number, recipe_names
from rl_plugins.config.settings import ABOVE_0
from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.redaction import redacted_words, without_password

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

T = TypeVar("T")

CONNECT_TIMEOUT_S = 15.0
_DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_PASSED_ON = ("MLFLOW_TRACKING_URI", "HF_ENDPOINT")
"""Addresses that every job gets, without passwords. Passwords and tokens are passed by --env."""
_SECRETS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN")
"""Variables that a job may need."""
_CALL_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S = 600.0
_UNREACHABLE_S = 120.0
_LAST_LINES_S = 10.0
_POLL_S = 1.0
_START_S = 60.0
"""Seconds for a cluster that has just started to accept jobs."""
_STOP_WAIT_S = 3600
_STOPPED_BY_USER = 130
"""Exit code after Ctrl-C, as of a process after SIGINT."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--address", help=f"address of the job server (default: RAY_ADDRESS, or {_DEFAULT_ADDRESS})")
    parser.add_argument("--folder", type=Path, default=Path(), help="project to send (default: this folder)")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="leave out more files")
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="send files that are left out otherwise; a file with a secret needs its whole path",
    )
    parser.add_argument(
        "--limit", type=number(float, ABOVE_0), default=50, metavar="MIB", help="largest size to send (default: 50)"
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=f"variable of the job, with a value or with its value here; passed by default: {', '.join(_PASSED_ON)}",
    )
    parser.add_argument("--no-wait", action="store_true", help="print the job's id and leave the job running")
    parser.add_argument("--dry-run", action="store_true", help="list the files, and send nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- RECIPE key=value ...")


def run(arguments: argparse.Namespace) -> int:
    """Submit the job, and follow the job unless --no-wait is given.

    Returns:
        Exit code of the job; 0 for --no-wait and --dry-run; 1 after a deadline.

    Raises:
        ConfigError: an option is wrong, the project is too large, or no job server answers.
    """
    from rl_plugins.commands.project_files import files_to_send, zip_files

    command = job_command(arguments.command)
    address = job_server(arguments.address)
    shown = without_password(address)
    environment = job_environment(arguments.env)
    root = arguments.folder.absolute()
    if not root.is_dir():
        raise ConfigError(f"--folder {root}: there is no such folder")
    files, secrets = files_to_send(root, arguments.exclude, arguments.include)
    if secrets:
        print(f"left out, as files with secrets: {', '.join(secrets)} (--include PATH sends one)", file=sys.stderr)
    if kept := [name for name in _SECRETS if name in os.environ and name not in environment]:
        print(f"not sent, as secrets: {', '.join(kept)} (--env NAME sends one)", file=sys.stderr)
    if arguments.dry_run:
        for path, file in sorted(files.items()):
            print(f"{file.stat().st_size / 2**20:.1f} MiB {path}")
        print(f"{len(files)} files of {root} for: {command}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "project.zip"
        size = zip_files(files, root, archive, limit_mib=arguments.limit)
        try:
            client = connect(address)
            job = submit_job(client, command, {"working_dir": str(archive), "env_vars": environment})
            print(f"{job}: {len(files)} files, {size / 2**20:.1f} MiB, to {shown}: {command}", file=sys.stderr)
            if not arguments.no_wait:
                return follow_job(client, job)
        except DeadlineExceeded as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(job)
    print(f"look: ray job logs {job} --follow --address {shown}", file=sys.stderr)
    print(f"stop: ray job stop {job} --address {shown}", file=sys.stderr)
    return 0


def job_command(words: Sequence[str]) -> str:
    """Return the shell command of the job. A recipe becomes `python -m` and the module of the recipe.

    Raises:
        ConfigError: there is no command, the first word is neither a recipe nor a program, or a word has a secret.
    """
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words:
        raise ConfigError("no command: rl-plugins submit -- RECIPE key=value ..., or -- python -m MODULE ...")
    recipes = recipe_names()
    if words[0] in recipes:
        words[:1] = ["python", "-m", f"rl_plugins.recipes.{words[0]}"]
    elif words[0].endswith(".yaml"):
        words[:0] = ["python", "-m", "rl_plugins"]
    elif "/" not in words[0] and shutil.which(words[0]) is None:
        near = difflib.get_close_matches(words[0], recipes, n=1)
        hint = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(recipes)}"
        raise ConfigError(f"{words[0]} is neither a recipe nor a program: {hint}")
    for word, public in zip(words, redacted_words(words), strict=True):
        if word != public:
            raise ConfigError(
                f"{public}: the command has a secret, and Ray shows commands on its dashboard: name a variable with "
                "--env NAME, and write '${oc.env:NAME}' in place of the value"
            )
    return shlex.join(words)


def job_server(option: str | None) -> str:
    """Return the address of the job server: the option, or the value of Ray's variables, or this machine.

    Raises:
        ConfigError: the address is not an HTTP address.
    """
    sources = {
        "--address": option,
        **{name: os.environ.get(name) for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")},
    }
    source, address = next(((name, value) for name, value in sources.items() if value), ("", _DEFAULT_ADDRESS))
    url = urlparse(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{source}={address}: name the job server, such as --address http://HOST:8265")
    return address.rstrip("/")


def job_environment(options: Sequence[str]) -> dict[str, str]:
    """Return the environment variables of the job.

    Args:
        options: values of --env, each `NAME` or `NAME=VALUE`.

    Raises:
        ConfigError: a variable is given without a value and is not set here.
    """
    # Ray kills a stopped job after these seconds, by default 3: the run saves its step first.
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S)}
    # The job cannot reach an MLflow store in a file of this machine.
    variables |= {
        name: without_password(os.environ[name]) for name in _PASSED_ON if os.environ.get(name, "").startswith("http")
    }
    for option in options:
        name, has_value, value = option.partition("=")
        if not has_value and name not in os.environ:
            raise ConfigError(f"--env {name}: it is not set here: give its value with --env {name}=...")
        variables[name] = value if has_value else os.environ[name]
    return variables


def connect(address: str) -> JobSubmissionClient:
    """Return a client of the job server, after the server has answered a request.

    Raises:
        ConfigError: no server answers at the address, the server is not a job server, or the server requires a token.
    """
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient
    from requests import RequestException

    from rl_plugins.launch.cluster import TOKEN

    # Ray sets a level for each of these loggers, and logs every package and every closed socket.
    for name in ("dashboard_sdk", "job.sdk"):
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.ERROR)
    shown = without_password(address)
    server = f"the job server at {shown}"
    try:
        with _ray_variable(address):
            client = within(CONNECT_TIMEOUT_S, server, lambda: JobSubmissionClient(address))
        # The constructor sends no token. This request does, if the cluster requires one.
        within(CONNECT_TIMEOUT_S, server, client.list_jobs)
        return client
    except AuthenticationError:
        raise ConfigError(f"the job server at {shown} wants the token of its cluster: {TOKEN}") from None
    except (OSError, RuntimeError, RequestException) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no Ray job server at {shown} ({reason}): start one (ray start --head), name another with --address "
            "http://HOST:8265 or RAY_ADDRESS, or forward its port (kubectl port-forward, ssh -L 8265:localhost:8265)"
        ) from None


def submit_job(client: JobSubmissionClient, command: str, runtime_env: dict[str, Any]) -> str:
    """Upload the project and submit the job. Wait for a cluster that has just started.

    Args:
        client: client of the job server.
        command: shell command of the job.
        runtime_env: Ray's runtime environment: the project and the environment variables.

    Returns:
        Id of the job.

    Raises:
        ConfigError: the job server refuses the job, or ends the connection.
        DeadlineExceeded: the upload takes too long.
    """
    from requests import RequestException

    submit = partial(client.submit_job, entrypoint=command, runtime_env=runtime_env)
    deadline = time.monotonic() + _START_S
    while True:
        try:
            return within(_UPLOAD_TIMEOUT_S, "the upload of the job", submit)
        except RuntimeError as error:
            # The head node answers before the agents that start jobs.
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise ConfigError(f"the job server refuses the job: {error}") from None
            time.sleep(_POLL_S)
        except RequestException as error:
            raise ConfigError(f"the job server does not take the project ({error}): repeat the command") from None


def follow_job(client: JobSubmissionClient, job: str) -> int:
    """Print the output of a job until the job ends. Ctrl-C stops the job; a second Ctrl-C only ends the waiting.

    Returns:
        Exit code of the job.

    Raises:
        DeadlineExceeded: the job server has not answered for two minutes. The job may still run.
    """
    from requests import RequestException

    output = threading.Thread(target=_print_logs, args=(client, job), name="logs", daemon=True)
    output.start()
    stopping = False
    while True:
        try:
            details = _wait_for_end(client, job)
            output.join(_LAST_LINES_S)
            return _exit_code(job, details, stopping)
        except KeyboardInterrupt:
            if stopping:
                print(f"\nthis command no longer waits for the end of {job}", file=sys.stderr)
                return _STOPPED_BY_USER
            stopping = True
            print(f"\nstopping {job} after its step; Ctrl-C again leaves that to the cluster", file=sys.stderr)
            try:
                within(_CALL_TIMEOUT_S, f"the stop of {job}", lambda: client.stop_job(job))
            except (RequestException, DeadlineExceeded, RuntimeError) as error:
                print(f"the job server does not stop {job} ({error}): use ray job stop {job}", file=sys.stderr)


def within(seconds: float, description: str, call: Callable[[], T]) -> T:
    """Return the result of a call, or raise after a deadline.

    Ray's client has no deadlines and waits forever for a silent server. The call runs in a daemon thread, which is left
    behind after the deadline: a thread of `concurrent.futures` would keep the process from exiting.

    Args:
        seconds: deadline in seconds.
        description: description of the call, for the message of an error.
        call: function without arguments. Exceptions of the call are raised here.

    Raises:
        DeadlineExceeded: the call did not return within the deadline.
    """
    pool = ThreadPool(1)
    try:
        return pool.apply_async(call).get(seconds)
    except multiprocessing.TimeoutError:
        raise DeadlineExceeded(f"{description} did not answer in {seconds:g} s") from None
    finally:
        pool.close()


@contextmanager
def _ray_variable(address: str) -> Iterator[None]:
    """Set RAY_API_SERVER_ADDRESS in the block: Ray's client prefers the variable to the argument `address`."""
    name = "RAY_API_SERVER_ADDRESS"
    before = os.environ.get(name)
    os.environ[name] = address
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _wait_for_end(client: JobSubmissionClient, job: str) -> JobDetails:
    from requests import RequestException

    last_answer = time.monotonic()
    while True:
        try:
            details = within(_CALL_TIMEOUT_S, "the job server", lambda: client.get_job_info(job))
            if details.status.is_terminal():
                return details
            last_answer = time.monotonic()
        # Ray raises a RuntimeError for an answer such as 502 of a proxy.
        except (RequestException, DeadlineExceeded, RuntimeError) as error:
            if time.monotonic() - last_answer > _UNREACHABLE_S:
                raise DeadlineExceeded(
                    f"the job server has not answered for {_UNREACHABLE_S:g} s ({error}); {job} may still run: look "
                    f"with ray job logs {job} --follow"
                ) from None
        time.sleep(_POLL_S)


def _exit_code(job: str, details: JobDetails, stopping: bool) -> int:
    status = str(details.status)
    if status == "SUCCEEDED":
        print(f"{job} succeeded", file=sys.stderr)
        return 0
    if status == "STOPPED":
        print(f"{job} was stopped{'' if stopping else ' by somebody else'}", file=sys.stderr)
        return _STOPPED_BY_USER if stopping else 1
    # The message ends with the last lines of the log, which are printed already.
    reason, _, _ = str(details.message).partition(", last available logs")
    print(f"{job} failed: {reason}", file=sys.stderr)
    return details.driver_exit_code or 1


def _print_logs(client: JobSubmissionClient, job: str) -> None:
    """Print the output of a job. After a lost connection, continue behind the last printed character."""
    import aiohttp

    num_printed = 0

    async def tail() -> None:
        nonlocal num_printed
        num_received = 0
        # Each connection sends the log from the beginning.
        async for text in client.tail_job_logs(job):
            new_text = text[max(0, num_printed - num_received) :]
            num_received += len(text)
            num_printed = max(num_printed, num_received)
            print(new_text, end="", flush=True)

    while True:
        try:
            asyncio.run(tail())
            return
        # Ray raises a plain RuntimeError for a lost connection.
        except (RuntimeError, OSError, aiohttp.ClientError):
            time.sleep(_POLL_S)
