"""The packages: their versions against what this project requires, and their binaries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rl_plugins.launch.diagnosis.finding import Finding

_DISTRIBUTION = "rl-plugins"
_IMPORT_TIMEOUT_S = 120.0
_HEAVY = {
    "torch": "import torch",
    "transformers": "from transformers import AutoModelForCausalLM",
    "lightning": "import lightning.pytorch",
    "ray": "from ray.train.torch import TorchTrainer",
    "deepspeed": "import deepspeed",
    "mlflow": "import mlflow",
    "vllm": "from vllm import LLM",
}
"""What loads the binaries of each library, some of which do that late."""


def packages() -> list[Finding]:
    """Python, every required package, and the build of vLLM."""
    required, python, extras = _requirements()
    return [_python(python), *(_package(requirement) for requirement in required), _vllm(extras)]


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def imports() -> list[Finding]:
    """Import each heavy library in a process of its own."""
    return [_import(name) for name in _HEAVY if importlib.util.find_spec(name) is not None]


def _requirements() -> tuple[list[Requirement], str, list[Requirement]]:
    """Packages, versions of Python, and the builds of vLLM; of a checkout, as its pyproject.toml says."""
    file = Path(__file__).parents[3] / "pyproject.toml"
    if file.is_file():
        project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        optional = project["optional-dependencies"]
        extras = [Requirement(line) for extra in ("cpu", "gpu") for line in optional[extra]]
        return [Requirement(line) for line in project["dependencies"]], project["requires-python"], extras
    lines = [Requirement(line) for line in importlib.metadata.requires(_DISTRIBUTION) or ()]
    python = importlib.metadata.metadata(_DISTRIBUTION)["Requires-Python"]
    always = [line for line in lines if line.marker is None]
    return always, python, [line for line in lines if "extra ==" in str(line.marker) and "vllm" in line.name]


def _python(wanted: str) -> Finding:
    version = platform.python_version()
    if SpecifierSet(wanted).contains(version):
        return Finding("python", "good", f"{version} ({sys.executable})")
    return Finding("python", "broken", f"{version}, wanted {wanted}", "make install PYTHON=/path/to/python3.11")


def _package(requirement: Requirement) -> Finding:
    version = installed(requirement.name)
    if version is None:
        return Finding(requirement.name, "broken", "not installed", f"pip install '{requirement}', or make install")
    if not requirement.specifier.contains(version, prereleases=True):
        wanted = f"{version}, wanted {requirement.specifier}"
        return Finding(requirement.name, "broken", wanted, f"pip install '{requirement}', or make install")
    return Finding(requirement.name, "good", version)


def _vllm(extras: list[Requirement]) -> Finding:
    """The build for CPUs is a distribution of another name."""
    found = [(requirement, version) for requirement in extras if (version := installed(requirement.name))]
    spec = importlib.util.find_spec("vllm")
    if not found or spec is None or not spec.submodule_search_locations:
        cure = "pip install 'rl-plugins[cpu]' or 'rl-plugins[gpu]'; until then use rollout.engine=transformers"
        return Finding("vllm", "absent", "not installed", cure)
    requirement, version = found[0]
    binaries = [path.name for folder in spec.submodule_search_locations for path in Path(folder).glob("_C*.so")]
    if not binaries:
        return Finding("vllm", "absent", f"{version}, without its binary (_C*.so)", f"pip install '{requirement}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("vllm", "absent", f"{version}, wanted {requirement.specifier}", f"pip install '{requirement}'")
    return Finding("vllm", "good", f"{version} ({requirement.name}: {', '.join(sorted(binaries))})")


def _import(name: str) -> Finding:
    start = time.perf_counter()
    command = [sys.executable, "-c", _HEAVY[name]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding(name, "broken", f"importing it did not end within {_IMPORT_TIMEOUT_S:.0f} s", "make install")
    seconds = f"{time.perf_counter() - start:.1f} s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Finding(name, "broken", last, "its binary does not fit the others: make install, or the versions above")
    return Finding(name, "good", f"imported in {seconds}")
