"""Writes docs/api.md: a section for each part of the package, with every name of `rl_plugins.PUBLIC`.

python docs/api_page.py           # write it
python docs/api_page.py --check   # exit with 1 where it differs from what would be written
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rl_plugins

PAGE = Path(__file__).resolve().parent / "api.md"
INTRODUCTION = """\
# Python API

`import rl_plugins as rl` offers these names, as in `rl.PolicyOptimization`. A name is loaded when it is first used: the
import of `rl_plugins` loads nothing heavy. Functions of the algorithms have
[a page of their own](algorithms/functions.md).
"""
SENTENCES = {
    "Stages": "LightningModules: one step of training, and the records that configure them.",
    "Strategies": "How models are sharded, and how their weights reach the rollout engine.",
    "Callbacks": "Every callback follows the stage's clock. [Callbacks](callbacks.md) describes the purpose of each.",
}
MEMBERS = {"Stage": "    options: {members: [export, named_models, optimize, make_parts]}\n"}
"""Options of names whose members the page does not all show."""


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for section, names in rl_plugins.PUBLIC.items():
        parts.append(f"\n## {section}\n")
        if section in SENTENCES:
            parts.append(f"\n{SENTENCES[section]}\n")
        entries = (f"::: rl_plugins.{module}.{name}\n{MEMBERS.get(name, '')}" for name, module in names.items())
        parts.append("\n" + "".join(entries))
    return "".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page; return the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/api.md from rl_plugins.PUBLIC.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page differs")
    text = page()
    if parser.parse_args(arguments).check:
        differs = PAGE.read_text(encoding="utf-8") != text
        print("docs/api.md differs: run python docs/api_page.py" if differs else "docs/api.md is current")
        return int(differs)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
