"""Show the installed packages, this machine, its services, and what will work here.

A problem is followed by the way to solve it. The command imports no heavy library without --imports. With --imports,
each library is imported in a separate process, which shows binaries of different builds, and the reports of PyTorch
(torch.utils.collect_env) and DeepSpeed (ds_report) are printed for bug reports. Exit status 1 means that a part is
broken which every run needs.

  rl-plugins doctor
  rl-plugins doctor --imports
  rl-plugins doctor --tracking-uri http://mlflow.example:5000
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_plugins.errors import ConfigError
from rl_plugins.redaction import without_password

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from rich.console import Console

_DISTRIBUTION = "rl-plugins"
_IMPORT_TIMEOUT_S = 120.0
_IMPORTS = {
    "torch": "import torch",
    "transformers": "from transformers import AutoModelForCausalLM",
    "lightning": "import lightning.pytorch",
    "ray": "from ray.train.torch import TorchTrainer",
    "deepspeed": "import deepspeed",
    "mlflow": "import mlflow",
    "vllm": "from vllm import LLM",
}
"""For each heavy library, a statement that loads its binaries. Some libraries load them later than `import`."""
_REPORTS = {"torch": "torch.utils.collect_env", "deepspeed": "deepspeed.env_report"}
"""For some libraries, the module that prints a report about the installation."""
_OP = "deepspeed_shm_comm"
_FULL_DISK = 0.95
"""Share of a disk above which Ray stops writing objects."""
_GPU_PARTS = ("GPU", "GPU driver", "CUDA of torch", "CUDA_VISIBLE_DEVICES", "/dev/shm")
_WAYS_TO_RUN = (
    ("one process", "launcher=local rollout.engine=transformers", ()),
    ("Ray with vLLM", "the default: ZeRO workers and a vLLM engine", ("Ray", "vllm", "DeepSpeed's op")),
    ("FSDP2", "strategy.name=fsdp, nothing is compiled", ("Ray", "vllm")),
    ("offload to files", "strategy.offload.policy=nvme", ("Ray", "vllm", "libaio", "c++", "ninja", "DeepSpeed's op")),
    ("GPU", "vLLM beside the trainers, weights by CUDA IPC", ("Ray", *_GPU_PARTS, "vllm", "c++", "ninja")),
)
"""Name and options of each way to run, and the findings that it needs besides the packages."""
_SERVICES = ("Ray", "MLflow")
"""Findings that only some ways to run need, even if broken. A run needs no MLflow with tracking.enabled=false."""


@dataclass(frozen=True)
class Finding:
    """One line of the output.

    Attributes:
        name: name of the package, tool, device or service.
        state: `good`; `absent` for a fault that concerns some ways to run; `broken` for a fault that concerns all.
        found: version, path, size or error.
        fix: command or option that solves the problem. Empty if there is no problem.
    """

    name: str
    state: Literal["good", "absent", "broken"]
    found: str
    fix: str = ""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--imports", action="store_true", help="import each heavy library (takes about a minute)")
    parser.add_argument(
        "--tracking-uri",
        default=os.environ.get("MLFLOW_TRACKING_URI"),
        help="MLflow store to check (default: MLFLOW_TRACKING_URI)",
    )


def run(arguments: Namespace) -> int:
    """Check the installation and print the findings.

    Returns:
        1 if a part is broken that every run needs, else 0.
    """
    from rich.console import Console

    sections = {
        "packages": check_packages(),
        "machine": check_machine(),
        "services": check_services(arguments.tracking_uri),
        **({"imports": check_imports()} if arguments.imports else {}),
    }
    console = Console(highlight=False)
    findings = [finding for section in sections.values() for finding in section]
    for title, section in sections.items():
        _print_section(console, title, section)
    _print_section(console, "what will work", check_ways_to_run(findings))
    if arguments.imports:
        _print_reports(console)
    broken = [finding.name for finding in findings if finding.state == "broken"]
    if broken:
        console.print(f"\nbroken: {', '.join(broken)}", style="bold red", markup=False)
    return 1 if broken else 0


def check_packages() -> list[Finding]:
    """Check the versions of Python and of all required packages, and the build of vLLM."""
    required, python, extras = _requirements()
    return [_check_python(python), *map(_check_package, required), _check_vllm(extras)]


def check_machine() -> list[Finding]:
    """Check compilers, DeepSpeed's communication operator, devices, memory, disks and libaio."""
    return [*_check_tools(), _check_op(), *_check_devices(), *_check_memory(), *_check_disks(), _check_libaio()]


def check_services(tracking_uri: str | None) -> list[Finding]:
    """Check the Ray cluster at `RAY_ADDRESS`, and the MLflow store.

    Args:
        tracking_uri: URI of the MLflow store. None stands for an SQLite file beside the runs.
    """
    return [_check_ray(os.environ.get("RAY_ADDRESS")), _check_mlflow(tracking_uri)]


def check_imports() -> list[Finding]:
    """Import each installed heavy library in a separate process."""
    return [_check_import(name) for name in _IMPORTS if importlib.util.find_spec(name) is not None]


def check_ways_to_run(findings: Sequence[Finding]) -> list[Finding]:
    """Return one finding for each way to run: good, or absent with the names of the missing parts.

    Args:
        findings: all findings about packages, machine and services.
    """
    broken = [finding.name for finding in findings if finding.state == "broken" and finding.name not in _SERVICES]
    lacking = {finding.name for finding in findings if finding.state != "good"}
    ways = []
    for name, options, needs in _WAYS_TO_RUN:
        missing = list(dict.fromkeys([*broken, *(need for need in needs if need in lacking)]))
        if missing:
            ways.append(Finding(name, "absent", f"{options}; it lacks {', '.join(missing)}"))
        else:
            ways.append(Finding(name, "good", options))
    return ways


def _print_section(console: Console, title: str, findings: Iterable[Finding]) -> None:
    marks = {"good": "[green]ok[/]     ", "absent": "[yellow]no[/]     ", "broken": "[bold red]BROKEN[/] "}
    console.print(f"\n[bold]{title}[/]")
    for finding in findings:
        console.print(f"  {marks[finding.state]}[bold]{finding.name:<20}[/] ", end="")
        console.print(finding.found, markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':<30}-> {finding.fix}", markup=False, soft_wrap=True)


def _print_reports(console: Console) -> None:
    for library, module in _REPORTS.items():
        if importlib.util.find_spec(library) is None:
            continue
        console.print(f"\n[bold]python -m {module}[/]")
        try:
            # Both modules write warnings about missing tools to stderr, which are of no use in a report.
            report = _run_python("-m", module).stdout
        except subprocess.TimeoutExpired:
            report = f"no report within {_IMPORT_TIMEOUT_S:.0f} s"
        console.print(report.strip(), markup=False, soft_wrap=True)


def _run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)


def _requirements() -> tuple[list[Requirement], str, list[Requirement]]:
    """Return the required packages, the versions of Python, and the packages with the builds of vLLM.

    A checkout has the requirements in pyproject.toml, an installed package in the metadata.
    """
    from packaging.requirements import Requirement

    file = Path(__file__).parents[2] / "pyproject.toml"
    if file.is_file():
        project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        optional = project["optional-dependencies"]
        extras = [Requirement(line) for extra in ("cpu", "gpu") for line in optional[extra]]
        return [Requirement(line) for line in project["dependencies"]], project["requires-python"], extras
    requirements = [Requirement(line) for line in importlib.metadata.requires(_DISTRIBUTION) or ()]
    python = importlib.metadata.metadata(_DISTRIBUTION)["Requires-Python"]
    required = [requirement for requirement in requirements if requirement.marker is None]
    extras = [
        requirement
        for requirement in requirements
        if "extra ==" in str(requirement.marker) and "vllm" in requirement.name
    ]
    return required, python, extras


def _check_python(required: str) -> Finding:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    if SpecifierSet(required).contains(version):
        return Finding("python", "good", f"{version} ({sys.executable})")
    return Finding("python", "broken", f"{version}, wanted {required}", "make install PYTHON=/path/to/python3.11")


def _check_package(requirement: Requirement) -> Finding:
    version = _installed_version(requirement.name)
    fix = f"pip install '{requirement}', or make install"
    if version is None:
        return Finding(requirement.name, "broken", "not installed", fix)
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, "broken", f"{version}, wanted {requirement.specifier}", fix)
    return Finding(requirement.name, "good", version)


def _check_vllm(extras: list[Requirement]) -> Finding:
    # The distributions for CPUs and for GPUs have different names.
    found = [(requirement, version) for requirement in extras if (version := _installed_version(requirement.name))]
    spec = importlib.util.find_spec("vllm")
    if not found or spec is None or not spec.submodule_search_locations:
        fix = "pip install 'rl-plugins[cpu]' or 'rl-plugins[gpu]'; until then use rollout.engine=transformers"
        return Finding("vllm", "absent", "not installed", fix)
    requirement, version = found[0]
    binaries = [path.name for folder in spec.submodule_search_locations for path in Path(folder).glob("_C*.so")]
    if not binaries:
        return Finding("vllm", "absent", f"{version}, without its binary (_C*.so)", f"pip install '{requirement}'")
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding("vllm", "absent", f"{version}, wanted {requirement.specifier}", f"pip install '{requirement}'")
    return Finding("vllm", "good", f"{version} ({requirement.name}: {', '.join(sorted(binaries))})")


def _installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_import(library: str) -> Finding:
    # Runs in one process need no vLLM.
    fault: Literal["absent", "broken"] = "absent" if library == "vllm" else "broken"
    start = time.perf_counter()
    try:
        process = _run_python("-c", _IMPORTS[library])
    except subprocess.TimeoutExpired:
        return Finding(library, fault, f"the import did not end within {_IMPORT_TIMEOUT_S:.0f} s", "make install")
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        fix = "its binary does not fit the other packages: make install, or install the versions above"
        return Finding(library, fault, last_line, fix)
    return Finding(library, "good", f"imported in {time.perf_counter() - start:.1f} s")


def _check_tools() -> Iterator[Finding]:
    for name, path, fix in (
        ("c++", _compiler(), "apt install g++, or name a compiler with CXX"),
        ("ninja", shutil.which("ninja"), "pip install ninja"),
        ("make", shutil.which("make"), "apt install make; without it use pip in place of the Makefile"),
    ):
        yield Finding(name, "good", path) if path else Finding(name, "absent", "not found", fix)


def _check_op() -> Finding:
    """Check ZeRO's communication on CPU, which the first use builds. A killed build leaves a lock file behind."""
    from rl_plugins.launch.build_lock import extensions_folder

    name, folder = "DeepSpeed's op", extensions_folder()
    if list(folder.glob(f"**/{_OP}/lock")):
        return Finding(
            name, "good", f"being built, or its build was killed ({folder}): the next run finds out which and continues"
        )
    if list(folder.glob(f"**/{_OP}/{_OP}.so")):
        return Finding(name, "good", f"built ({folder})")
    missing = [tool for tool, path in (("c++", _compiler()), ("ninja", shutil.which("ninja"))) if not path]
    if missing:
        fix = f"install {' and '.join(missing)}; until then use strategy.name=fsdp"
        return Finding(name, "absent", "not built, and cannot be built", fix)
    return Finding(name, "good", "not built yet: the first run builds it, which takes a minute")


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _check_devices() -> Iterator[Finding]:
    usable, cores = len(os.sched_getaffinity(0)), os.cpu_count()
    yield Finding("CPU", "good", f"{usable} cores" if usable == cores else f"{usable} of {cores} cores")
    yield from check_gpus()


def check_gpus() -> Iterator[Finding]:
    """Check GPUs, driver, the build of torch, NCCL, peer access and CUDA_VISIBLE_DEVICES."""
    from rl_plugins.launch import gpu_checks
    from rl_plugins.launch.gpus import VISIBLE, hidden_gpus, local_gpus, nccl_version, read_machine

    machine = read_machine()
    if not machine.gpus and not local_gpus() and not hidden_gpus():
        yield Finding("GPU", "absent", "none", "everything runs on CPU, in float32 or bfloat16")
        return
    faults: dict[str, gpu_checks.Fault] = {}
    for fault in (*gpu_checks.faults_of_software(machine), *gpu_checks.faults_of_devices(machine)):
        faults.setdefault(fault.part, fault)
    free = ", ".join(f"{gpu.free_mib / 1024:.1f}" for gpu in machine.gpus)
    parts = {
        "GPU": f"{gpu_checks.kinds_words(machine.gpus)}; GiB free: {free}",
        "GPU driver": gpu_checks.driver_words(machine),
        "CUDA of torch": f"{gpu_checks.version_words(machine.torch_cuda or (0, 0))} (torch {machine.torch})",
        VISIBLE: f"{machine.variables.get(VISIBLE, 'not set')}: CUDA shows {len(machine.visible)} of "
        f"{len(machine.gpus)} GPUs, and Ray counts {machine.counted_by_ray}",
    }
    for part, found in parts.items():
        if part in faults:
            yield Finding(part, "absent", faults[part].found, faults[part].fix)
        else:
            yield Finding(part, "good", found)
    if machine.torch_cuda and (nccl := nccl_version(machine.torch_cuda)):
        yield Finding("NCCL", "good", nccl)
    if len(machine.gpus) > 1:
        yield _check_peer_access()


def _check_peer_access() -> Finding:
    from rl_plugins.launch.gpus import pairs_without_peer_access

    try:
        pairs = pairs_without_peer_access()
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("peer access", "good", f"unknown ({error})")
    if pairs:
        fix = "NCCL copies through the memory of the host, which is slower; see nvidia-smi topo -m"
        return Finding("peer access", "good", f"none between the GPUs {', '.join(pairs)}", fix)
    return Finding("peer access", "good", "between all GPUs")


def _check_memory() -> Iterator[Finding]:
    import psutil

    from rl_plugins.launch.gpu_checks import LEAST_SHM_BYTES

    memory = psutil.virtual_memory()
    yield Finding("memory", "good", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free")
    shared = shutil.disk_usage("/dev/shm")
    yield Finding(
        "/dev/shm",
        "good" if shared.total >= LEAST_SHM_BYTES else "absent",
        f"{shared.total / 2**30:.1f} GiB, {shared.free / 2**30:.1f} free (Ray's object store, NCCL)",
        "" if shared.free > 2**30 else "below 1 GiB Ray takes a slower folder: docker run --shm-size=16g",
    )


def _check_disks() -> Iterator[Finding]:
    for name, folder in (("disk", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        usage = shutil.disk_usage(folder)
        is_full = usage.used / usage.total > _FULL_DISK
        fix = "Ray stops at 95 %: free some space, or set TMPDIR (Ray's files) and run.output_dir" if is_full else ""
        yield Finding(name, "absent" if is_full else "good", f"{folder}: {usage.free / 2**30:.1f} GiB free", fix)


def _check_libaio() -> Finding:
    # DeepSpeed looks for the same two things: the library, and the header for the build.
    folders = ["/usr/include", "/usr/local/include", *os.environ.get("CPATH", "").split(os.pathsep)]
    has_header = any((Path(folder) / "libaio.h").is_file() for folder in folders if folder)
    if ctypes.util.find_library("aio") and (has_header or "-I" in os.environ.get("CFLAGS", "")):
        return Finding("libaio", "good", "installed")
    return Finding("libaio", "absent", "library or header not found", "apt install libaio-dev (for offload to nvme)")


def _check_ray(address: str | None) -> Finding:
    from rl_plugins.launch.cluster import check_cluster

    if not address:
        return Finding("Ray", "good", "RAY_ADDRESS names no cluster: every run starts its own on this machine")
    try:
        check_cluster(address)
    except ConfigError as error:
        found, _, fix = str(error).rpartition(": ")
        # `rl-plugins submit` takes the address of a job server from the same variable.
        return Finding("Ray", "absent" if "://" in address else "broken", found, fix)
    return Finding("Ray", "good", f"RAY_ADDRESS={address} answers")


def _check_mlflow(uri: str | None) -> Finding:
    from rl_plugins.tracking.store import check_store

    if uri is None:
        return Finding("MLflow", "good", "no store is named: runs write an SQLite file in run.output_dir")
    try:
        check_store(uri)
    except ConfigError as error:
        found, _, fix = str(error).rpartition(": ")
        return Finding("MLflow", "broken", found, fix)
    return Finding("MLflow", "good", f"{without_password(uri)} answers")
