"""Run a recipe as a Ray job: send the project, follow the job, return its exit code.

Sent is what git tracks in the current folder, and what is new and not ignored; never .git, environments, data, outputs
and checkpoints. Paths in the command are those of the cluster. Nothing is installed there: its machines have the
environment. Ctrl-C stops the job; `run.resume=true` goes on from its last checkpoint.

  rl-plugins submit -- grpo model.path=/shared/model 'data.train_files=[/shared/train.parquet]' \\
      run.output_dir=/shared/outputs run.name=first
  rl-plugins submit --address http://head:8265 --env HF_TOKEN -- grpo run.name=first run.resume=true ...
  rl-plugins submit --no-wait -- python -m my_project.train --epochs 3
  rl-plugins submit --dry-run -- grpo ...
"""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlparse

from rl_plugins.errors import ConfigError, DeadlineExceeded

_DEFAULT_ADDRESS = "http://127.0.0.1:8265"
# What a job needs to report where its user looks; passwords and tokens go only by name.
_PASSED_ON = ("MLFLOW_TRACKING_URI", "HF_ENDPOINT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument("--address", help=f"of the job server; otherwise RAY_ADDRESS, or {_DEFAULT_ADDRESS}")
    parser.add_argument("--folder", type=Path, default=Path(), help="the project that is sent (default: this folder)")
    parser.add_argument("--exclude", action="append", default=[], metavar="PATTERN", help="leave more out")
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN", help="send it all the same")
    parser.add_argument("--limit", type=float, default=50, metavar="MIB", help="most that is sent (default: 50)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help=f"a variable of the job, as it is here or with a value; passed on anyway: {', '.join(_PASSED_ON)}",
    )
    parser.add_argument("--no-wait", action="store_true", help="print the job's id and leave it running")
    parser.add_argument("--dry-run", action="store_true", help="list what would be sent, and send nothing")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- RECIPE key=value ...")


def run(arguments: argparse.Namespace) -> int:
    """Submit, and follow unless told not to; returns the job's exit code.

    Raises:
        ConfigError: an option is wrong, the project is too large, or nobody answers at the address.
    """
    from rl_plugins.launch.working_folder import describe_largest, files_to_send, zip_files

    command = job_command(arguments.command)
    address = job_server(arguments.address)
    environment = job_environment(arguments.env)
    root = arguments.folder.absolute()
    if not root.is_dir():
        raise ConfigError(f"--folder {root}: there is no such folder")
    files = files_to_send(root, arguments.exclude, arguments.include)
    if arguments.dry_run:
        print(describe_largest({path: file.stat().st_size for path, file in files.items()}))
        print(f"{len(files)} files of {root} for: {command}")
        return 0
    from rl_plugins.launch.ray_job import connect, follow, submit

    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "project.zip"
        size = zip_files(files, root, archive, limit_mib=arguments.limit)
        # Ray lets its variables win over the address that it is given.
        os.environ["RAY_API_SERVER_ADDRESS"] = address
        try:
            client = connect(address)
            job = submit(client, command, runtime_env={"working_dir": str(archive), "env_vars": environment})
            print(f"{job}: {len(files)} files, {size / 2**20:.1f} MiB, to {address}: {command}", file=sys.stderr)
            if not arguments.no_wait:
                return follow(client, job)
        except DeadlineExceeded as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(job)
    print(f"look: ray job logs {job} --follow --address {address}", file=sys.stderr)
    print(f"stop: ray job stop {job} --address {address}", file=sys.stderr)
    return 0


def job_command(words: Sequence[str]) -> str:
    """The shell command of the job; a recipe's name stands for its module.

    Raises:
        ConfigError: there is none, or its first word is neither a recipe nor a program.
    """
    words = list(words[1:] if words[:1] == ["--"] else words)
    if not words:
        raise ConfigError("no command: rl-plugins submit -- RECIPE key=value ..., or -- python -m MODULE ...")
    recipes = sorted(path.stem for path in _recipes().glob("[a-z]*.py"))
    if words[0] in recipes:
        words[:1] = ["python", "-m", f"rl_plugins.recipes.{words[0]}"]
    elif "/" not in words[0] and shutil.which(words[0]) is None:
        near = difflib.get_close_matches(words[0], recipes, n=1)
        meant = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(recipes)}"
        raise ConfigError(f"{words[0]} is neither a recipe nor a program: {meant}")
    return shlex.join(words)


def job_server(option: str | None) -> str:
    """The address of the job server: as given, or where Ray's variables say, or on this machine.

    Raises:
        ConfigError: it is not an HTTP address.
    """
    named = {"--address": option, **{name: os.environ.get(name) for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")}}
    origin, address = next(((name, value) for name, value in named.items() if value), ("", _DEFAULT_ADDRESS))
    url = urlparse(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"{origin}={address}: name the job server, such as --address http://HOST:8265")
    return address.rstrip("/")


def job_environment(options: Sequence[str]) -> dict[str, str]:
    """Environment variables of the job.

    Raises:
        ConfigError: one is to be passed on that is not set.
    """
    # A store in a file is one of this machine.
    variables = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name, "").startswith("http")}
    for option in options:
        name, given, value = option.partition("=")
        if not given and name not in os.environ:
            raise ConfigError(f"--env {name}: it is not set here: give its value with --env {name}=...")
        variables[name] = value if given else os.environ[name]
    return variables


def _recipes() -> Path:
    import rl_plugins

    return Path(rl_plugins.__file__).parent / "recipes"
