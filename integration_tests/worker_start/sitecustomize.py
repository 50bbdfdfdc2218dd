"""Starts a Ray worker as a fork of `integration_tests.ray_workers`. Python imports this file at each start.

Ray starts `python setup_worker.py ...` for a worker with a runtime environment, and `python default_worker.py ...` for
other workers. This process then asks the server for a fork which does the work, and stands for the fork until its end:
Ray sees the exit status, and a signal or kill reaches the fork.
"""

import os
import sys

VARIABLE = "FORKED_RAY_WORKERS"
# Address of the server. With an empty value, workers are new interpreters.
SET_UP, WORKER = "ray/_private/workers/setup_worker.py", "ray/_private/workers/default_worker.py"


def _worker_arguments() -> "tuple[list[str], dict[str, str]] | None":
    """Return arguments and variables of the worker; None if no fork can replace the worker."""
    if sys.orig_argv[1].endswith(WORKER):
        return sys.orig_argv[1:], dict(os.environ)
    import argparse
    import json
    import re

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, arguments = parser.parse_known_args(sys.orig_argv[2:])
    context = json.loads(options.serialized_runtime_env_context)
    variables = context.pop("env_vars", {})
    if context.pop("py_executable", sys.executable) != sys.executable or any(context.values()):
        return None
    if options.language != "PYTHON" or VARIABLE in variables:
        return None
    # As in `ray._private.utils.update_envs`.
    for name, value in variables.items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    return arguments, dict(os.environ)


def _stand_for_fork(arguments: "list[str]", variables: "dict[str, str]") -> None:
    """Ask for a fork, wait for its end and end with its status."""
    import json
    import signal
    import socket

    request = {
        "args": arguments,
        "cwd": os.getcwd(),
        "env": variables,
        "niceness": os.nice(0),
        "stands_for": os.getpid(),
    }
    file = os.memfd_create("request")
    os.write(file, json.dumps(request).encode())
    os.lseek(file, 0, os.SEEK_SET)
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ[VARIABLE])
    socket.send_fds(server, [b"f"], [file, 0, 1, 2])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda sent, _: server.sendall(bytes([sent])))
    reports = server.makefile().read().split()
    if len(reports) < 2:
        print("the server of Ray's workers ended before the worker", file=sys.stderr)
        os._exit(1)
    status = int(reports[1])
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _replace_worker() -> None:
    """Replace this process by a fork, if this process begins as a worker of Ray."""
    if os.environ.get(VARIABLE) and len(sys.orig_argv) > 2 and sys.orig_argv[1].endswith((SET_UP, WORKER)):
        worker = _worker_arguments()
        if worker is not None:
            _stand_for_fork(*worker)


_replace_worker()
