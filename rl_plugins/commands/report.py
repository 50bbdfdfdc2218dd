"""Write a run on one page: report.html in its folder, which needs no network and no other file.

A run writes it by itself when it ends; this writes it anew, of a run that is going on too.

  rl-plugins report outputs/grpo
  rl-plugins report outputs/grpo --output grpo.html
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rl_plugins.commands.run_argument import add_run, run_of


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--output", type=Path, help="the file to write (default: report.html in the folder)")


def run(arguments: Namespace) -> int:
    """Write the page.

    Raises:
        ConfigError: the folder is not that of a run.
    """
    from rl_plugins.report.page import write_report

    print(f"the report is in {write_report(run_of(arguments.run), arguments.output)}")
    return 0
