"""Runs one after the other in the same workers of one Ray cluster: a run takes a second or two.

`python -m integration_tests.in_turn FILE STORAGE` trains the recipes of a JSON file: lists of a name and overrides.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.shared_workers import train_in_turn
from integration_tests.command_server import start_command
from integration_tests.conftest import Recipe
from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.compose import compose_config


@contextmanager
def runs_in_turn(recipes: Sequence[Sequence[str]], folder: Path) -> Iterator[Callable[[str], Path]]:
    """Start all runs; return a function, which waits for the end of a run and returns the folder of the run.

    No process is left at the end of the block.

    Args:
        recipes: name and overrides of each run, with `run.output_dir=FOLDER`.
        folder: folder for the runs.
    """
    file, log = folder / "recipes.json", folder / "log.txt"
    file.write_text(json.dumps(recipes))
    with log.open("w") as output:
        command = [sys.executable, "-m", "integration_tests.in_turn", str(file), str(folder / "ray")]
        started = Recipe(folder, start_command(command, cwd=folder, stdout=output, stderr=output), log, "in_turn")
    ended: set[str] = set()

    def wait_for(run: str) -> Path:
        started.wait_until((folder / run / "done").is_file, f"the end of {run}")
        ended.add(run)
        return folder / run

    try:
        yield wait_for
        if len(ended) == len(recipes):
            assert started.wait() == 0, started.tail()
    finally:
        # Also after a failed test: Ray and the workers would take the time of all later tests.
        if started.process.poll() is None:
            started.kill()


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    train_in_turn([parse_config(compose_config(name, overrides)) for name, *overrides in runs], Path(sys.argv[2]))
