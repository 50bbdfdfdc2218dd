from __future__ import annotations

from rl_plugins.commands.main import main as console_script


def main(arguments: list[str]) -> int:
    """`rl-plugins prepare ...`."""
    return console_script(["prepare", *arguments])
