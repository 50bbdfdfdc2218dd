"""Writes requirements/cpu.lock.txt: the exact version of all that `make quickstart` and `make test` install.

pip resolves the project with its extras `cpu`, `dev` and `docs` without installing anything, and the outcome is
written down less what the CPU installation leaves out. Pins of the present lock are kept where they still
fit; `--upgrade` forgets them. Other options go to pip.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).with_name("cpu.lock.txt")
LEFT_OUT = {
    "rl-plugins": "installed from this checkout",
    "torchvision": "built for CUDA on the index, breaks beside CPU torch; text models need none",
    "torchaudio": "as torchvision",
    "torchcodec": "as torchvision",
    "triton": "1 GB of CUDA compiler; on CPU vLLM, xgrammar and torch run without it",
}
HEADER = """\
# Made by `make lock`: do not edit. For Linux x86_64, Python 3.11, CPU; `make install` uses --no-deps.
"""


def normalized(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(pip_options: list[str], constraints: Path | None) -> dict[str, str]:
    """Normalized name -> "name==version" of every distribution that the project needs."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
    ]
    command += pip_options
    if constraints is not None:
        command += ["--constraint", str(constraints)]
    report = subprocess.run(
        [*command, f"{LOCK.parent.parent}[cpu,dev,docs]"], check=True, stdout=subprocess.PIPE
    ).stdout
    found = [item["metadata"] for item in json.loads(report)["install"]]
    return {normalized(item["name"]): f"{item['name']}=={item['version']}" for item in found}


def main() -> None:
    """Resolves and writes the lock."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions pyproject.toml allows")
    options, pip_options = parser.parse_known_args()
    pins = resolve(pip_options, constraints=None if options.upgrade or not LOCK.exists() else LOCK)
    notes = [f"# Left out: {name} ({why}).\n" for name, why in LEFT_OUT.items()]
    lines = [f"{pins[name]}\n" for name in sorted(pins) if name not in LEFT_OUT]
    LOCK.write_text(HEADER + "".join(notes) + "".join(lines))
    print(f"{LOCK}: {len(lines)} distributions")


if __name__ == "__main__":
    main()
