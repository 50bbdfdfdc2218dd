"""A Ray job from its submission to its exit code: followed, stopped by Ctrl-C, every wait with a deadline.

Ray's client waits for ever for a server that is silent, so each of its calls runs in a thread that is left behind.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rl_plugins.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

T = TypeVar("T")

CONNECT_TIMEOUT_S = 15.0
_CALL_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S = 600.0
_UNREACHABLE_S = 120.0
_LAST_LINES_S = 10.0
_POLL_S = 1.0
STOPPED_BY_USER = 130
"""The exit code of a job that Ctrl-C has stopped: that of a process ended by SIGINT."""


def connect(address: str) -> JobSubmissionClient:
    """A client of the job server.

    Raises:
        ConfigError: nobody answers there, or not as a job server does.
    """
    import logging

    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient
    from requests import RequestException

    # They tell of every package and of every socket that is closed, each at a level of its own.
    for name in ("dashboard_sdk", "job.sdk"):
        logging.getLogger(f"ray.dashboard.modules.{name}").setLevel(logging.ERROR)
    try:
        client = within(CONNECT_TIMEOUT_S, f"the job server at {address}", lambda: JobSubmissionClient(address))
        # Asks for the token, if the cluster wants one.
        within(CONNECT_TIMEOUT_S, f"the job server at {address}", client.list_jobs)
        return client
    except AuthenticationError:
        raise ConfigError(
            f"the job server at {address} wants the token of its cluster: put that into ~/.ray/auth_token, where it is "
            "on the head's machine, or into RAY_AUTH_TOKEN, and set RAY_AUTH_MODE=token"
        ) from None
    except (OSError, RuntimeError, RequestException) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no Ray job server at {address} ({reason}): start one (ray start --head), name another with --address "
            "http://HOST:8265 or RAY_ADDRESS, or forward its port (kubectl port-forward, ssh -L 8265:localhost:8265)"
        ) from None


def submit(client: JobSubmissionClient, command: str, **options: Any) -> str:
    """Send the job with its package; returns its id.

    Raises:
        ConfigError: the job server refuses it.
        DeadlineExceeded: the upload takes too long.
    """
    try:
        send = partial(client.submit_job, entrypoint=command, **options)
        return within(_UPLOAD_TIMEOUT_S, "the upload of the job", send)
    except RuntimeError as error:
        raise ConfigError(f"the job server refuses the job: {error}") from None


def follow(client: JobSubmissionClient, job: str) -> int:
    """Print the job's output until it ends, and return its exit code; Ctrl-C stops it, a second one only stops looking.

    Raises:
        DeadlineExceeded: the job server has not answered for two minutes; the job may go on.
    """
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
                print(f"\n{job} is being stopped by the cluster; no longer looking", file=sys.stderr)
                return STOPPED_BY_USER
            stopping = True
            print(f"\nstopping {job}; Ctrl-C again leaves that to the cluster", file=sys.stderr)
            within(_CALL_TIMEOUT_S, f"the stop of {job}", lambda: client.stop_job(job))


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """The result of a call, within a deadline.

    Raises:
        DeadlineExceeded: names what was waited for.
    """
    results: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue()

    def run() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise DeadlineExceeded(f"{what} did not answer in {seconds:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _wait_for_end(client: JobSubmissionClient, job: str) -> JobDetails:
    from requests import RequestException

    answered = time.monotonic()
    while True:
        try:
            details = within(_CALL_TIMEOUT_S, "the job server", lambda: client.get_job_info(job))
            if details.status.is_terminal():
                return details
            answered = time.monotonic()
        except (RequestException, DeadlineExceeded) as error:
            if time.monotonic() - answered > _UNREACHABLE_S:
                raise DeadlineExceeded(
                    f"the job server has not answered for {_UNREACHABLE_S:g} s ({error}); {job} may go on: look with "
                    f"ray job logs {job} --follow"
                ) from None
        time.sleep(_POLL_S)


def _exit_code(job: str, details: JobDetails, stopping: bool) -> int:
    status = str(details.status)
    if status == "SUCCEEDED":
        print(f"{job} succeeded", file=sys.stderr)
        return 0
    if status == "STOPPED":
        print(f"{job} was stopped{'' if stopping else ' by somebody else'}", file=sys.stderr)
        return STOPPED_BY_USER if stopping else 1
    # What it said has been printed.
    reason, _, _ = str(details.message).partition(", last available logs")
    print(f"{job} failed: {reason}", file=sys.stderr)
    return details.driver_exit_code or 1


def _print_logs(client: JobSubmissionClient, job: str) -> None:
    """Print what the job says; after a lost connection go on where it was."""
    import aiohttp

    printed = 0

    async def tail() -> None:
        nonlocal printed
        seen = 0
        async for text in client.tail_job_logs(job):
            fresh = text[max(0, printed - seen) :]
            seen += len(text)
            printed = max(printed, seen)
            print(fresh, end="", flush=True)

    while True:
        try:
            asyncio.run(tail())
            return
        # Ray raises bare RuntimeErrors for connections that were lost.
        except (RuntimeError, OSError, aiohttp.ClientError):
            time.sleep(_POLL_S)
