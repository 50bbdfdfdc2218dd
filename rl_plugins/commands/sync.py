"""Send MLflow what it lacks of a run: after an outage that outlasted the run, or to another store.

Metrics come from the run's `metrics.jsonl`, tables from its samples, the rest from its folder. No value is sent twice,
but for those of steps that a roll-back has repeated, and no policy registered twice. To another store a run goes as a
new one, and from then on belongs there. Of a pipeline all stages are sent.

  rl-plugins sync outputs/first
  rl-plugins sync outputs/first --uri http://tracking:5000
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_plugins.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument("folder", type=Path, help="of the run or pipeline, such as outputs/first")
    parser.add_argument("--uri", help="of the tracking store, if it is not the run's own")
    parser.add_argument("--deadline", type=float, default=600.0, metavar="S", help="seconds for all (default: 600)")


def run(arguments: argparse.Namespace) -> int:
    """Send; returns 0 if the store has everything now.

    Raises:
        ConfigError: the folder is neither a run's nor a pipeline's, or the store does not answer.
    """
    folder = arguments.folder.absolute()
    if (folder / "pipeline.yaml").is_file():
        from rl_plugins.launch.parent_run import ParentRun

        if arguments.uri is not None:
            raise ConfigError(
                f"--uri {arguments.uri}: {folder} is a pipeline: send its stages to another store one by one"
            )
        return 0 if ParentRun(folder).sync(arguments.deadline) else 1
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
    from rl_plugins.launch.sync import sync

    return 0 if sync(folder, arguments.uri, arguments.deadline) else 1
