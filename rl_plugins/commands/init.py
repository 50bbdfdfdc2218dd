"""Write a small project into a new folder: a recipe, a reward with its test, data, and a tiny model.

The project runs at once, in one process on CPU. Then put your own rows, reward and model in their place.

  rl-plugins init solver
  rl-plugins init projects/solver && cd projects/solver && python -m pytest test_reward.py && rl-plugins recipe.yaml
"""

from __future__ import annotations

import runpy
import shlex
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rl_plugins.commands.main import output_path
from rl_plugins.errors import ConfigError
from rl_plugins.whole_file import storage_errors

TEMPLATE = Path(__file__).parent / "new_project"


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `rl-plugins init`."""
    parser.add_argument("folder", type=output_path, help="folder of the project; it must not exist, or be empty")


def run(arguments: Namespace) -> int:
    """Write the project, and print the next commands.

    Raises:
        ConfigError: the folder has content.
        StorageError: the folder cannot be written.
    """
    folder: Path = arguments.folder
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: name a new folder")
    from rl_plugins.launch.quickstart import save_base

    with storage_errors(folder):
        shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        runpy.run_path(str(folder / "make_data.py"))["write_data"](folder / "data")
        save_base(folder / "model", seed=0)
    files = ", ".join(sorted(path.name for path in TEMPLATE.iterdir() if path.is_file()))
    print(f"{folder} has {files}, data and a tiny model. Next:")
    print(f"  cd {shlex.quote(str(folder))}\n  python -m pytest test_reward.py\n  rl-plugins recipe.yaml")
    print("  rl-plugins show outputs/first")
    return 0
