"""The machine: compiler, devices, memory, disk, and what DeepSpeed builds."""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from rl_plugins.launch.command_line import extensions_folder
from rl_plugins.launch.diagnosis.finding import Finding
from rl_plugins.launch.diagnosis.packages import installed
from rl_plugins.launch.resources import local_gpus

_OP = "deepspeed_shm_comm"
_QUERY_TIMEOUT_S = 10.0
_FULL = 0.95
"""Of a disk: above it Ray writes no objects any more."""


def machine() -> list[Finding]:
    """Everything that is looked at here."""
    return [*_tools(), _op(), *_devices(), *_memory(), *_disks(), _libaio()]


def _tools() -> Iterator[Finding]:
    for name, programs, cure in (
        ("c++", ("c++", "g++", "clang++"), "apt install g++, or name one with CXX"),
        ("ninja", ("ninja",), "pip install ninja"),
        ("make", ("make",), "apt install make; without it use pip in place of the Makefile"),
    ):
        path = next((found for program in programs if (found := shutil.which(program))), None)
        yield Finding(name, "good", path) if path else Finding(name, "absent", "not found", cure)


def _op() -> Finding:
    """ZeRO's communication on CPU is built on first use, under a lock that a killed build leaves behind."""
    name, folder = "DeepSpeed's op", extensions_folder()
    if list(folder.glob(f"**/{_OP}/lock")):
        return Finding(
            name, "good", f"being built, or its build was killed ({folder}): the next run finds out which and goes on"
        )
    if list(folder.glob(f"**/{_OP}/{_OP}.so")):
        return Finding(name, "good", f"built ({folder})")
    missing = [tool for tool, there in (("c++", _compiler()), ("ninja", shutil.which("ninja"))) if not there]
    if missing:
        cure = f"install {' and '.join(missing)}; until then use strategy.name=fsdp"
        return Finding(name, "absent", "neither built nor to be built", cure)
    return Finding(name, "good", "not built yet: the first run builds it, which takes a minute")


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _devices() -> Iterator[Finding]:
    usable, cores = len(os.sched_getaffinity(0)), os.cpu_count()
    yield Finding("CPU", "good", f"{usable} cores" if usable == cores else f"{usable} of {cores} cores")
    if not local_gpus():
        yield Finding("GPU", "absent", "none", "everything runs on CPU, in float32 or bfloat16")
        return
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("GPU", "absent", f"{local_gpus()}, but nvidia-smi fails: {error}", "mend the driver")
        return
    torch = installed("torch") or ""
    if torch.endswith("+cpu"):
        cure = "install the CUDA build of torch and the extra gpu"
        yield Finding("GPU", "absent", f"{'; '.join(said.splitlines())}, but torch {torch} is built for CPUs", cure)
        return
    yield Finding("GPU", "good", "; ".join(said.splitlines()))


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding("memory", "good", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} free")
    shared = shutil.disk_usage("/dev/shm")
    yield Finding(
        "/dev/shm",
        "good",
        f"{shared.total / 2**30:.1f} GiB, {shared.free / 2**30:.1f} free (Ray's object store)",
        "" if shared.free > 2**30 else "below 1 GiB Ray takes a slower folder: docker run --shm-size=8g",
    )


def _disks() -> Iterator[Finding]:
    for name, folder in (("disk", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        usage = shutil.disk_usage(folder)
        full, said = usage.used / usage.total > _FULL, f"{folder}: {usage.free / 2**30:.1f} GiB free"
        cure = "Ray stops at 95 %: make room, or set TMPDIR (Ray's files) and run.output_dir" if full else ""
        yield Finding(name, "absent" if full else "good", said, cure)


def _libaio() -> Finding:
    # As DeepSpeed looks for it: the library, and its header for the build.
    folders = ["/usr/include", "/usr/local/include", *os.environ.get("CPATH", "").split(os.pathsep)]
    header = any((Path(folder) / "libaio.h").is_file() for folder in folders if folder)
    if ctypes.util.find_library("aio") and (header or "-I" in os.environ.get("CFLAGS", "")):
        return Finding("libaio", "good", "there")
    return Finding("libaio", "absent", "library or header not found", "apt install libaio-dev (for offload to nvme)")
