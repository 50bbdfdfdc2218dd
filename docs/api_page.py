"""Write docs/api.md and rl_plugins/__init__.pyi from the names in `rl_plugins.PUBLIC`.

The page has a section for each part of the package. The stub gives the names their types, because the package itself
imports a name when it is first used.

python docs/api_page.py           # write both files
python docs/api_page.py --check   # exit with 1 if a file differs from the text to write
"""

from __future__ import annotations

import argparse
from pathlib import Path

import rl_plugins

PAGE = Path(__file__).resolve().parent / "api.md"
STUB = PAGE.parent.parent / "rl_plugins" / "__init__.pyi"
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


def stub() -> str:
    """Return the text of the stub."""
    names = sorted((module, name) for section in rl_plugins.PUBLIC.values() for name, module in section.items())
    imports = "".join(f"from rl_plugins.{module} import {name} as {name}\n" for module, name in names)
    variables = "__version__: str\nPUBLIC: dict[str, dict[str, str]]\n_MODULES: dict[str, str]\n"
    return f"# Written by docs/api_page.py.\n{imports}\n{variables}"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the files; return the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/api.md and rl_plugins/__init__.pyi.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file differs")
    texts = {PAGE: page(), STUB: stub()}
    if not parser.parse_args(arguments).check:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return 0
    different = [path.name for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    print(f"{' and '.join(different)} differ: run python docs/api_page.py" if different else "both files are current")
    return int(bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
