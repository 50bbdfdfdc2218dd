"""Send MLflow the missing content of a run, after an outage at the end of the run, or move the run to another store.

Metrics come from `metrics.jsonl`, tables from the samples, and everything else from the folder of the run. No value is
sent twice, except for steps repeated by a roll-back, and no policy is registered twice. With --uri the run
becomes a new run in another store, and belongs to the other store from then on. For a pipeline, all stages are sent.

  rl-plugins sync outputs/first
  rl-plugins sync outputs/first --uri http://tracking:5000
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from rl_plugins.commands.main import number
from rl_plugins.config.settings import SECONDS
from rl_plugins.errors import ConfigError
from rl_plugins.run_folder import RunFolder
from rl_plugins.run_lock import owned


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", type=Path, help="folder of the run or pipeline, such as outputs/first")
    parser.add_argument("--uri", help="URI of another tracking store (default: the store of the run)")
    parser.add_argument(
        "--deadline", type=number(float, SECONDS), default=600.0, metavar="S", help="seconds for the run (default: 600)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Send the missing content.

    Returns:
        0 if the store has everything, else 1.

    Raises:
        ConfigError: the folder is not the folder of a run or pipeline, the run, the pipeline or a stage is running, or
            the store does not answer.
    """
    folder = arguments.folder.absolute()
    if (folder / "pipeline.yaml").is_file():
        from rl_plugins.launch.pipeline import ParentRun

        if arguments.uri is not None:
            raise ConfigError(
                f"--uri {arguments.uri}: {folder} is a pipeline: send its stages to another store one by one"
            )
        parent = ParentRun(folder)
        with ExitStack() as stack:
            stack.enter_context(owned(RunFolder(folder), "pipeline"))
            for stage in parent.stages.values():
                if stage.path.is_dir():
                    stack.enter_context(owned(stage))
            return 0 if parent.sync(arguments.deadline) else 1
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: it has no config.yaml")
    from rl_plugins.launch.mlflow_run import sync

    with owned(RunFolder(folder)):
        return 0 if sync(folder, arguments.uri, arguments.deadline) else 1
