"""Parts of all pages: paths, tables, values, command lines, and the axes of tensors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parents[1]
RECIPES = ROOT / "recipes" / "conf"
NOTE = "<!-- Written by docs/algorithms/generate.py from docstrings and recipes/conf, the places to change. -->"
NOT_IN_YAML = "An option with `++` is not in the YAML file: the command line needs the two signs before such an option."
COUNTS = "with D ranks, and N tokens and S sequences in the global mini-batch"
AXES = {
    "B": "samples (responses) of a batch, or pairs of them",
    "T": "tokens of the longest response",
    "G": "groups (the samples of one prompt are a group)",
    "K": "rewards of one sample, or the teacher's most likely tokens at one position",
    "N": "pairs, responses, values, or tokens of all samples in one row",
    "V": "vocabulary",
    "1": "axis of length 1, for broadcasting",
}
"""Meaning of each letter at the end of a tensor's name; `axes_of` refuses any other letter."""


def page(parts: Iterable[str]) -> str:
    """Join the parts of a page; empty parts are left out."""
    return "\n\n".join(part for part in (NOTE, *parts) if part) + "\n"


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Format a Markdown table, empty without rows; a bar in a cell is escaped, in code spans too."""
    cells = [tuple(cell.replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ("---",) * len(headings), *cells)) if cells else ""


def sentence(text: str) -> str:
    """Add a capital and a full stop."""
    return text[0].upper() + text[1:].removesuffix(".") + "."


def yaml_value(value: object) -> str:
    """Format a value as YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def command(recipe: str, *options: str) -> str:
    """Format the command line that starts a recipe."""
    first = " ".join([f"python -m rl_plugins.recipes.{recipe}", *options, "model.path=MODEL"])
    return f"```bash\n{first} \\\n    'data.train_files=[TRAIN.parquet]' 'data.val_files=[VAL.parquet]'\n```"


def axes_of(name: str) -> str:
    """Return the axes at the end of a tensor's name, such as `[B, T]`; empty for other names."""
    axes = re.search(r"_([A-Z1]+)$", name)
    if not axes or name.isupper():
        return ""
    unexplained = set(axes[1]) - set(AXES)
    if unexplained:
        letters = ", ".join(sorted(unexplained))
        raise SystemExit(f"axis {letters} of {name} is not explained: add it to AXES in {__file__}")
    return f"[{', '.join(axes[1])}]"


def defaults_of(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and default of a function's options: arguments that are neither tensors nor functions."""
    for parameter in inspect.signature(function).parameters.values():
        is_option = parameter.default is not parameter.empty and not callable(parameter.default)
        if is_option and not axes_of(parameter.name):
            yield parameter.name, parameter.default
