"""Write the report of a run: report.html in the folder of the run, one page without links to other files.

A run writes the report when the run ends. This command writes the report again, also during a run.

  rl-plugins report outputs/grpo
  rl-plugins report outputs/grpo --output grpo.html
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from rl_plugins.commands.main import add_run_argument, existing_run, output_path


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_argument(parser)
    parser.add_argument("--output", type=output_path, help="file to write (default: report.html in the folder)")


def run(arguments: Namespace) -> int:
    """Write the report.

    Raises:
        ConfigError: the folder is not the folder of a run, or a file of the run is damaged.
    """
    from rl_plugins.report.page import write_report

    print(f"the report is in {write_report(existing_run(arguments.run), arguments.output)}")
    return 0
