"""Run `rl-plugins COMMAND ...`: import the module of the command, and no other command."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import NoReturn

import yaml
from typing_extensions import override

from rl_plugins import __version__
from rl_plugins.config.hydra_errors import CONFIG_FOLDER
from rl_plugins.config.settings import Range, shown
from rl_plugins.errors import ConfigError, UserError
from rl_plugins.garbage_collection import garbage_collector_off
from rl_plugins.run_folder import RunFolder
from rl_plugins.storage import local_path
from rl_plugins.user_code import exits_refused

COMMANDS = {
    "doctor": "show the installation, this machine, and what will work",
    "init": "write a small project that runs at once",
    "prepare": "make data files from raw files, and check data files",
    "generate": "sample responses to the prompts of parquet files",
    "evaluate": "score samples, and compare two policies",
    "export": "convert a checkpoint into a Hugging Face folder",
    "submit": "run a recipe as a Ray job, and print its output",
    "sync": "send MLflow the content that a run could not send",
    "show": "show curves, times and samples of a run in the terminal",
    "report": "write the report of a run, one page for a browser",
    "plan": "estimate memory and time of a step for each placement",
}
"""Summary of every command. The command `x` is the module `rl_plugins.commands.x`."""

_USAGE = (
    "usage: rl-plugins COMMAND ...\n       rl-plugins RECIPE key=value ...\n\ncommands:\n{}\n\nrecipes: {}, or a file "
    "of options such as recipe.yaml\n\n`rl-plugins COMMAND --help` shows its arguments and examples."
)
_INTERRUPTED = 130
_INTERMIXED = {"plan"}
"""Commands whose options may stand between positional arguments."""


class _Parser(ArgumentParser):
    """Parser that raises a ConfigError, whose message is one line, and prints no usage."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` shows the arguments")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: words of the command line behind the program. By default those of this process.

    Returns:
        Exit status of the command; 2 after a `ConfigError` or a wrong argument, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
        print(_USAGE.format(commands, ", ".join(recipe_names())))
        return 0 if words else 2
    if words[0] == "--version":
        print(f"rl-plugins {__version__}")
        return 0
    name = words.pop(0)
    if name in recipe_names() or name.endswith(".yaml"):
        return _run_recipe(name, words)
    if name not in COMMANDS:
        near = get_close_matches(name, [*COMMANDS, *recipe_names()], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are: {', '.join(COMMANDS)}"
        print(f"error: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    try:
        parsed = parse_arguments(name, words)
        with exits_refused():
            status: int = import_module(f"rl_plugins.commands.{name}").run(parsed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status


def recipe_names() -> list[str]:
    """Return the names of all recipes."""
    return sorted(file.stem for file in CONFIG_FOLDER.parent.glob("*.py") if file.stem != "__init__")


def _run_recipe(name: str, options: list[str]) -> int:
    """Run a recipe as `python -m rl_plugins.recipes.NAME` does, which may end the process with `SystemExit`.

    Args:
        name: recipe, or a YAML file whose `defaults` begin with a recipe.
        options: options of the recipe.
    """
    recipe, file = name, Path(name)
    if name.endswith(".yaml"):
        try:
            defaults = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("defaults") or [None]
        except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
            print(f"error: {name}: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        recipe = defaults[0]
        if recipe not in recipe_names():
            print(f"error: {name}: its defaults must begin with a recipe: {', '.join(recipe_names())}", file=sys.stderr)
            return 2
        options = ["--config-dir", str(file.absolute().parent), "--config-name", file.stem, *options]
    sys.argv[1:] = options
    run_module(f"rl_plugins.recipes.{recipe}", run_name="__main__", alter_sys=True)
    return 0


def parse_arguments(name: str, words: Sequence[str]) -> Namespace:
    """Return the arguments of a command.

    Args:
        name: name in `COMMANDS`.
        words: words of the command line behind the name.

    Raises:
        ConfigError: an argument is unknown, missing or wrong.
    """
    with garbage_collector_off():
        command = import_module(f"rl_plugins.commands.{name}")
    parser = _Parser(
        prog=f"rl-plugins {name}", description=command.__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    return parser.parse_intermixed_args(words) if name in _INTERMIXED else parser.parse_args(words)


def add_run_argument(parser: ArgumentParser) -> None:
    """Declare the argument `run`, the folder of a run."""
    parser.add_argument("run", type=Path, help="folder of the run, such as outputs/grpo")


def number(kind: type[int] | type[float], allowed: Range) -> Callable[[str], float]:
    """Return the type of an argument of the command line: a number in a range."""

    def read(text: str) -> float:
        try:
            value: object = kind(text)
        except ValueError:
            value = text
        if fault := allowed.fault(value, kind):
            raise ArgumentTypeError(f"{text if isinstance(value, float) else shown(value)}: {fault}")
        assert isinstance(value, int | float)
        return value

    return read


def output_path(text: str) -> Path:
    """Return the path of a file or a folder that a command writes, for an argument of the command line."""
    try:
        return local_path("path", text)
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None


def existing_run(path: Path) -> RunFolder:
    """Return the run in a folder.

    Raises:
        ConfigError: the folder is not the folder of a run. The message names the runs below the folder.
    """
    folder = RunFolder(path)
    if not folder.metrics.is_file():
        runs = sorted(file.parent.name for file in path.glob(f"*/{folder.metrics.name}"))
        hint = f"; there are runs in it: {', '.join(runs)}" if runs else ""
        raise ConfigError(f"{path} is not the folder of a run: it has no {folder.metrics.name}{hint}")
    return folder
