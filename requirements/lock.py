"""Writes the locks: the exact version of each distribution of an installation, and the digest of its file.

- `cpu.lock.txt`: the extras `cpu`, `dev` and `docs`, for `make quickstart` and `make test`;
- `cuda.lock.txt`: the extras `gpu` and `dev`, for machines with GPUs and the Dockerfile.

pip resolves the project without installing anything, and the outcome is written down less what is left out. Pins of the
present lock are kept where they still fit; `--upgrade` forgets them. The tests run with cpu.lock.txt, so cuda.lock.txt
has the same versions of all dependencies in pyproject.toml. Other options go to pip.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Lock:
    """What a lock is for, and what it leaves out with the reason: distributions, and digests."""

    extras: str
    target: str
    left_out: dict[str, str] = field(default_factory=dict)
    without_digest: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Pin:
    """A distribution as "name==version", and the SHA-256 digest of its file."""

    text: str
    digest: str = ""


LOCKS = {
    "cpu": Lock(
        "cpu,dev,docs",
        "Made by `make lock`: do not edit. For Linux x86_64, Python 3.11, CPU; `make install` uses --no-deps.",
        {
            "torchvision": "built for CUDA on the index, breaks beside CPU torch; text models need none",
            "torchaudio": "as torchvision",
            "torchcodec": "as torchvision",
            "triton": "1 GB of CUDA compiler; on CPU vLLM, xgrammar and torch run without it",
        },
        {"torch": "indexes have builds for CPUs of their own, and `make install` takes nothing else from TORCH_INDEX"},
    ),
    "cuda": Lock(
        "gpu,dev",
        "Made by `make lock-cuda`: do not edit. For Linux x86_64, Python 3.11 and 3.12, CUDA 13. docs/gpus.md says how "
        "to install.",
    ),
}


def normalized(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def tested_versions() -> list[str]:
    """The pins of cpu.lock.txt for the dependencies in pyproject.toml, as constraints; a build for CPUs is excluded."""
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {normalized(re.split(r"[^\w.-]", line)[0]) for line in project["dependencies"]}
    pins = pins_of(FOLDER / "cpu.lock.txt")
    return [
        pin.replace("==", "!=") if pin.endswith("+cpu") else pin
        for pin in pins
        if normalized(pin.partition("==")[0]) in named
    ]


def pins_of(lock: Path) -> list[str]:
    """The pins of a lock with their markers, without digests: pip takes no digests for a project in a folder."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return [line.partition(" --hash=")[0] for line in lines if line[0] != "#"]


def resolve(python: str, extras: str, constraints: list[str], pip_options: list[str]) -> dict[str, Pin]:
    """Normalized name -> pin of every distribution that the project needs with this interpreter."""
    command = [
        sys.executable, "-m", "pip", "--python", python, "install",
        "--dry-run", "--ignore-installed", "--quiet", "--report", "-",
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints))
        file.flush()
        report = subprocess.run(
            [*command, *pip_options, "--constraint", file.name, f"{FOLDER.parent}[{extras}]"],
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
    pins = {}
    for item in json.loads(report)["install"]:
        name, version = item["metadata"]["name"], item["metadata"]["version"]
        # The project itself is a folder without a digest.
        archive = item["download_info"].get("archive_info", {})
        pins[normalized(name)] = Pin(f"{name}=={version}", archive.get("hashes", {}).get("sha256", ""))
    return pins


def version_of(python: str) -> str:
    """The version of an interpreter, such as "3.11"."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def lines_of(pins: dict[str, dict[str, Pin]]) -> list[str]:
    """The lines of a lock, from the pins of each version of Python. What differs has a marker."""
    lines = []
    for name in sorted({name for of_version in pins.values() for name in of_version}):
        pins_of_name = {version: of_version[name] for version, of_version in pins.items() if name in of_version}
        if len(pins_of_name) == len(pins) and len({pin.text for pin in pins_of_name.values()}) == 1:
            lines.append(line_of(next(iter(pins_of_name.values())).text, pins_of_name.values()))
        else:
            lines += [
                line_of(f'{pin.text} ; python_version == "{version}"', [pin]) for version, pin in pins_of_name.items()
            ]
    return lines


def line_of(requirement: str, pins: Iterable[Pin]) -> str:
    """A line of a lock. Each version of Python may have its own file."""
    digests = sorted({pin.digest for pin in pins if pin.digest})
    return " ".join([requirement, *(f"--hash=sha256:{digest}" for digest in digests)])


def main() -> None:
    """Resolves and writes a lock."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lock", choices=LOCKS, default="cpu", help="the lock to write (default: cpu)")
    parser.add_argument("--python", action="append", help="interpreter; repeat it for several (default: this one)")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions pyproject.toml allows")
    options, pip_options = parser.parse_known_args()
    lock, file = LOCKS[options.lock], FOLDER / f"{options.lock}.lock.txt"
    constraints = tested_versions() if options.lock == "cuda" else []
    if file.exists() and not options.upgrade:
        constraints += pins_of(file)
    left_out = {"rl-plugins": "installed from this checkout", **lock.left_out}
    pins = {}
    for name in options.python or [sys.executable]:
        python = shutil.which(name) or parser.error(f"--python {name}: there is no such interpreter")
        resolved = resolve(python, lock.extras, constraints, pip_options)
        for name in lock.without_digest:
            resolved[name] = Pin(resolved[name].text)
        pins[version_of(python)] = {name: pin for name, pin in resolved.items() if name not in left_out}
    lines = lines_of(pins)
    notes = [f"Left out: {name} ({why})." for name, why in left_out.items()]
    notes += [f"Without a digest: {name} ({why})." for name, why in lock.without_digest.items()]
    file.write_text("".join(f"{line}\n" for line in (f"# {lock.target}", *(f"# {note}" for note in notes), *lines)))
    print(f"{file}: {len(lines)} distributions")


if __name__ == "__main__":
    main()
