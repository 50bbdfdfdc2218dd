"""The argument of a command that is about a run."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder


def add_run(parser: ArgumentParser) -> None:
    """Declare it."""
    parser.add_argument("run", type=Path, help="the folder of a run, such as outputs/grpo")


def run_of(path: Path) -> RunFolder:
    """The run in a folder.

    Raises:
        ConfigError: there is none; names those that are below it.
    """
    folder = RunFolder(path)
    if not folder.metrics.is_file():
        below = sorted(found.parent.name for found in path.glob(f"*/{folder.metrics.name}"))
        hint = f"; there are runs in it: {', '.join(below)}" if below else ""
        raise ConfigError(f"{path} is not the folder of a run: it has no {folder.metrics.name}{hint}")
    return folder
