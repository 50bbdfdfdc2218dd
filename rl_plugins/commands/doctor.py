"""Say what is installed here, what this machine has, and what will work; for what is missing, the way out.

Nothing heavy is imported, unless --imports asks for it: then each library is imported in a process of its own, which
shows binaries that do not fit together. Exits with status 1 if something that every run needs is broken.

  rl-plugins doctor
  rl-plugins doctor --imports
  rl-plugins doctor --tracking-uri http://mlflow.example:5000
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_plugins.launch.diagnosis.finding import Finding


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--imports", action="store_true", help="import each heavy library (takes about a minute)")
    parser.add_argument(
        "--tracking-uri",
        default=os.environ.get("MLFLOW_TRACKING_URI"),
        help="MLflow store to be looked for (default: MLFLOW_TRACKING_URI)",
    )


def run(arguments: Namespace) -> int:
    """Examine and report."""
    from rich.console import Console

    from rl_plugins.launch.diagnosis.machine import machine
    from rl_plugins.launch.diagnosis.outlook import outlook
    from rl_plugins.launch.diagnosis.packages import imports, packages
    from rl_plugins.launch.diagnosis.services import services

    found = {
        "packages": packages(),
        "machine": machine(),
        "services": services(arguments.tracking_uri),
        **({"imports": imports()} if arguments.imports else {}),
    }
    console = Console(highlight=False)
    everything = [finding for findings in found.values() for finding in findings]
    for title, findings in found.items():
        _print(console, title, findings)
    _print(console, "what will work", outlook(everything))
    broken = [finding.name for finding in everything if finding.state == "broken"]
    if broken:
        console.print(f"\nbroken: {', '.join(broken)}", style="bold red", markup=False)
    return 1 if broken else 0


def _print(console: Any, title: str, findings: Iterable[Finding]) -> None:
    marks = {"good": "[green]ok[/]     ", "absent": "[yellow]no[/]     ", "broken": "[bold red]BROKEN[/] "}
    console.print(f"\n[bold]{title}[/]")
    for finding in findings:
        console.print(f"  {marks[finding.state]}[bold]{finding.name:<20}[/] ", end="")
        console.print(finding.said, markup=False, soft_wrap=True)
        if finding.cure:
            console.print(f"{'':<30}-> {finding.cure}", markup=False, soft_wrap=True)
