"""Section `environment`: versions, driver, memory, and the checks that `rl-plugins doctor` makes."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import torch

from integration_tests.gpu.without_vllm.cases import Case, Place, Skipped
from rl_plugins.launch.gpus import read_machine

_LIBRARIES = ("torch", "transformers", "lightning", "deepspeed", "tensordict", "peft", "triton", "numpy")


def cases(place: Place) -> Iterable[Case]:
    """Return the cases."""
    return [Case("versions", versions), Case("machine", machine), Case("faults", lambda: faults(place))]


def versions() -> Mapping[str, Any]:
    """Return the versions of Python and the libraries."""
    return {"python": platform.python_version(), **{library: _version(library) for library in _LIBRARIES}}


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "missing"


def machine() -> Mapping[str, Any]:
    """Return the facts about GPU, driver, NCCL and shared memory."""
    facts = read_machine()
    gpus = {f"gpu {gpu.index}": f"{gpu.name}, {gpu.free_mib} of {gpu.memory_mib} MiB free" for gpu in facts.visible}
    driver = {"driver": facts.gpus[0].driver} if facts.gpus else {}
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if torch.cuda.is_available() else {}
    return {**gpus, **driver, "cuda": torch.version.cuda, **nccl, "shm_mib": facts.shm_bytes // 2**20}


def faults(place: Place) -> Mapping[str, Any]:
    """Check the machine as a run on GPUs does.

    Raises:
        AssertionError: the machine has a fault.
    """
    if not place.on_gpu:
        raise Skipped("the checks are for GPUs")
    from rl_plugins.launch.gpu_checks import faults_of_devices, faults_of_software

    facts = read_machine()
    found = [*faults_of_software(facts), *faults_of_devices(facts)]
    assert not found, "; ".join(f"{fault.found}: {fault.fix}" for fault in found)
    return {}
