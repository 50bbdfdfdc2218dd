"""GPUs of a machine, and the software and variables without which a run cannot use the GPUs.

Everything is read from nvidia-smi, from libcuda and from files, because the import of a library takes seconds and may
start CUDA in this process.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SMI_TIMEOUT_S = 30.0
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version", "mig.mode.current")
VISIBLE = "CUDA_VISIBLE_DEVICES"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Names of the variable with the settings of torch's allocator."""
Version = tuple[int, int]


@dataclass(frozen=True)
class Gpu:
    """A GPU of a machine, visible or not.

    Attributes:
        index: number of the GPU in nvidia-smi.
        uuid: name of the GPU for CUDA_VISIBLE_DEVICES, `GPU-...`.
        name: product.
        memory_mib: memory in MiB; 0 if nvidia-smi does not give the number.
        free_mib: free memory in MiB; 0 if nvidia-smi does not give the number.
        driver: version of the driver.
        mig: True if MIG divides the GPU into parts.
    """

    index: int
    uuid: str
    name: str
    memory_mib: int
    free_mib: int
    driver: str
    mig: bool


@dataclass(frozen=True)
class GpuMachine:
    """Facts about a machine with GPUs, for the checks of a run.

    Attributes:
        gpus: all GPUs, visible or not.
        smi_error: error of nvidia-smi; empty if nvidia-smi works.
        driver_cuda: newest CUDA version of the driver; None without a driver.
        torch: version of torch; empty if torch is not installed.
        torch_cuda: CUDA version of the build of torch; None for a build for CPUs.
        shm_bytes: size of /dev/shm in bytes.
        memory_bytes: size of the host memory in bytes.
        variables: values of CUDA_VISIBLE_DEVICES and of the settings of torch's allocator, if set.
    """

    gpus: tuple[Gpu, ...]
    smi_error: str
    driver_cuda: Version | None
    torch: str
    torch_cuda: Version | None
    shm_bytes: int
    memory_bytes: int
    variables: dict[str, str]

    @property
    def visible(self) -> list[Gpu]:
        """GPUs shown by CUDA to a process."""
        return [
            self.gpus[place] for place in visible_places([gpu.uuid for gpu in self.gpus], self.variables.get(VISIBLE))
        ]

    @property
    def counted_by_ray(self) -> int:
        """Number of GPUs counted by a Ray started here: Ray counts the entries of CUDA_VISIBLE_DEVICES."""
        variable = self.variables.get(VISIBLE)
        if variable is None:
            return len(self.gpus)
        return min(len(self.gpus), len(variable.split(","))) if variable else 0


def visible_places(uuids: Sequence[str], variable: str | None) -> list[int]:
    """Return the places of the GPUs shown by CUDA. The first wrong entry of the variable ends the list.

    Args:
        uuids: UUID of each GPU of the machine. The variable may have the beginning of a UUID.
        variable: value of CUDA_VISIBLE_DEVICES; None if the variable is not set.
    """
    if variable is None:
        return list(range(len(uuids)))
    places: list[int] = []
    for entry in map(str.strip, variable.split(",")):
        is_uuid = entry.startswith("GPU-")
        named = [n for n, uuid in enumerate(uuids) if (uuid.startswith(entry) if is_uuid else entry == str(n))]
        if len(named) != 1 or named[0] in places:
            break
        places += named
    return places


def local_gpus() -> int:
    """Return the number of GPUs shown by CUDA to this process, from device files and CUDA_VISIBLE_DEVICES alone."""
    files, variable = _device_files(), os.environ.get(VISIBLE)
    if variable and variable.startswith(("GPU-", "MIG-")):
        # The files have no UUIDs.
        return min(files, len(variable.split(",")))
    return len(visible_places([""] * files, variable))


def hidden_gpus() -> str:
    """Return words for the value of CUDA_VISIBLE_DEVICES if it hides GPUs of this machine, else no words."""
    return f"{VISIBLE}={os.environ[VISIBLE]!r}" if local_gpus() < _device_files() else ""


def read_machine() -> GpuMachine:
    """Return the facts about this machine, for processes with the variables of this process."""
    gpus: tuple[Gpu, ...] = ()
    smi_error = ""
    try:
        lines = nvidia_smi(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits").splitlines()
        gpus = tuple(_gpu(line) for line in lines)
    except (OSError, subprocess.SubprocessError) as error:
        smi_error = str(getattr(error, "stdout", None) or error).strip()
    torch, torch_cuda = _torch_build()
    return GpuMachine(
        gpus=gpus,
        smi_error=smi_error,
        driver_cuda=driver_cuda(),
        torch=torch,
        torch_cuda=torch_cuda,
        shm_bytes=shutil.disk_usage("/dev/shm").total,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        variables={name: os.environ[name] for name in (VISIBLE, *ALLOCATOR) if name in os.environ},
    )


def pairs_without_peer_access() -> list[str]:
    """Return the pairs of GPUs without access to each other's memory, such as `0-1`.

    Raises:
        OSError: there is no nvidia-smi.
        subprocess.SubprocessError: nvidia-smi failed.
    """
    rows = [line.split() for line in nvidia_smi("topo", "-p2p", "r").splitlines()]
    states = [row[1:] for row in rows if re.fullmatch(r"GPU\d+", row[0] if row else "") and "X" in row]
    return [
        f"{first}-{second}"
        for first, row in enumerate(states)
        for second, state in enumerate(row[: len(states)])
        if first < second and state != "OK"
    ]


def nccl_version(cuda: Version) -> str | None:
    """Return the version of the NCCL package beside a build of torch; None if NCCL is not a package.

    Args:
        cuda: CUDA version of the build of torch.
    """
    try:
        return importlib.metadata.version(f"nvidia-nccl-cu{cuda[0]}")
    except importlib.metadata.PackageNotFoundError:
        return None


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi, which is installed with the driver.

    Raises:
        OSError: there is no nvidia-smi.
        subprocess.SubprocessError: nvidia-smi failed, or did not answer.
    """
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True).stdout


def driver_cuda() -> Version | None:
    """Return the newest CUDA version of the driver; None without a driver.

    libcuda answers in place of nvidia-smi, because a container can have a newer libcuda than the driver of its machine.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def _device_files() -> int:
    # WSL has no file for each GPU. A driver for NVIDIA's GPUs brings its library.
    files = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
    return files or int(Path("/usr/lib/wsl/lib/libcuda.so.1").exists())


def _gpu(line: str) -> Gpu:
    index, uuid, name, memory, free, driver, mig = (value.strip() for value in line.split(","))
    return Gpu(int(index), uuid, name, _number(memory), _number(free), driver, mig == "Enabled")


def _number(value: str) -> int:
    # Machines whose GPU uses the memory of the host answer [N/A].
    return int(value) if value.isdigit() else 0


def _torch_build() -> tuple[str, Version | None]:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return "", None
    build = runpy.run_path(str(Path(spec.submodule_search_locations[0]) / "version.py"))
    if build["cuda"] is None:
        return build["__version__"], None
    major, minor = build["cuda"].split(".")[:2]
    return build["__version__"], (int(major), int(minor))
