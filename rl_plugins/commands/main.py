"""`rl-plugins COMMAND ...`: finds the command, and imports no other."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from rl_plugins import __version__
from rl_plugins.errors import ConfigError

COMMANDS = {
    "doctor": "say what is installed here and what will work",
    "prepare": "make data files from raw ones, and check them",
    "generate": "sample responses to prompts, parquet in and out",
    "evaluate": "score samples, and compare two policies",
    "export": "turn a checkpoint into a Hugging Face folder",
    "submit": "run a recipe as a Ray job, and follow it",
    "sync": "send MLflow what a run could not send itself",
    "show": "a run's curves, times and samples in the terminal",
    "report": "a run on one page, for a browser",
    "plan": "memory and time of a step by placement, before there is a machine",
}
"""Every command, a module of this package, with what it does."""

_USAGE = "usage: rl-plugins COMMAND ...\n\ncommands:\n{}\n\n`rl-plugins COMMAND --help` explains one, with examples."
_INTERRUPTED = 130
_INTERMIXED = {"plan"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, which is 2 where the user has something to mend."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_USAGE.format("\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())))
        return 0 if given else 2
    if given[0] == "--version":
        print(f"rl-plugins {__version__}")
        return 0
    name = given.pop(0)
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(COMMANDS)}"
        print(f"error: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    command = import_module(f"rl_plugins.commands.{name}")
    parser = ArgumentParser(
        prog=f"rl-plugins {name}", description=command.__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    # Options may stand between a recipe's `key=value`, which argparse takes in one row only unless it is asked.
    parsed = parser.parse_intermixed_args(given) if name in _INTERMIXED else parser.parse_args(given)
    try:
        status: int = command.run(parsed)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    return status
