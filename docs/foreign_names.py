"""Write rl_plugins/config/foreign_names.json, the options of verl, TRL and OpenRLHF, from the tables of coming_from.md.

python docs/foreign_names.py           # write the file
python docs/foreign_names.py --check   # exit with 1 if the file differs from the text to write
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "coming_from.md"
NAMES = PAGE.parent.parent / "rl_plugins" / "config" / "foreign_names.json"
PROJECTS = ("verl", "TRL", "OpenRLHF")


def names(page: str) -> dict[str, tuple[str, str]]:
    """Return the project and the option here, by the name of the project's option."""
    found: dict[str, tuple[str, str]] = {}
    divisors = []
    for line in page.splitlines():
        here, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| `") or len(cells) != len(PROJECTS):
            continue
        ours = here.replace("`", "")
        for project, cell in zip(PROJECTS, cells, strict=True):
            whole, *parts = cell.split(" / ")
            divisors += [(name, (project, ours)) for part in parts for name in _options(part)]
            for name in _options(whole):
                first, before = found.get(name, (project, ours))
                if name not in ours.split(", "):
                    found[name] = (first, before if ours in before.split(" or ") else f"{before} or {ours}")
    # An option that only divides another option.
    found |= {name: entry for name, entry in divisors if name not in found}
    return dict(sorted(found.items()))


def text() -> str:
    """Return the text of the file, with a line for each option."""
    entries = names(PAGE.read_text(encoding="utf-8")).items()
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries)
    return f"{{\n{lines}\n}}\n"


def _options(cell: str) -> list[str]:
    """Return the options of a cell. A name without dots behind a dotted name is in the same group."""
    options: list[str] = []
    for name in re.findall(r"`((?:--)?[A-Za-z][\w.]*)`", re.sub(r"\([^)]*\)", "", cell)):
        group = options[-1].rpartition(".")[0] if options else ""
        options.append(f"{group}.{name}" if group and "." not in name else name)
    return options


def main() -> int:
    """Write or check the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if parser.parse_args().check:
        return int(text() != NAMES.read_text(encoding="utf-8"))
    NAMES.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
