"""Outputs of nvidia-smi as a driver prints them, for machines without a driver."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from rl_plugins.launch import gpus
from rl_plugins.launch.gpus import Gpu, GpuMachine

H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-80GB"
NO_PEERS = """ \tGPU0\tGPU1\t
 GPU0\tX\tCNS\t
 GPU1\tCNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""
"""`nvidia-smi topo -p2p r` of two GPUs behind a chipset without peer access."""
PEERS = NO_PEERS.replace("\tCNS\t", "\tOK\t")
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n\n"
)
"""Output of nvidia-smi without the kernel's module, with exit status 9."""


def query(*names: str, driver: str = "580.95.05", mig: str = "Disabled") -> str:
    """The answer to the query of `gpus.read_machine`: a line for each GPU."""
    return "".join(
        f"{index}, GPU-{index}5c93b3a-4bd2-f1f6-0bbf-5d0e8c8f1a{index}{index}, {name}, 81559, 81004, {driver}, {mig}\n"
        for index, name in enumerate(names)
    )


def answer(monkeypatch: pytest.MonkeyPatch, gpu_lines: str, peers: str = PEERS) -> None:
    """Let nvidia-smi answer with recorded outputs."""
    monkeypatch.setattr(gpus, "nvidia_smi", lambda *arguments: peers if arguments[0] == "topo" else gpu_lines)
    monkeypatch.setattr(gpus, "_device_files", lambda: len(gpu_lines.splitlines()))


def fail(monkeypatch: pytest.MonkeyPatch, output: str, files: int) -> None:
    """Let nvidia-smi fail on a machine with device files."""

    def nvidia_smi(*arguments: str) -> str:
        raise subprocess.CalledProcessError(9, ["nvidia-smi", *arguments], output=output)

    monkeypatch.setattr(gpus, "nvidia_smi", nvidia_smi)
    monkeypatch.setattr(gpus, "_device_files", lambda: files)


def machine(*names: str, mig: tuple[int, ...] = (), **facts: Any) -> GpuMachine:
    """Return a good machine with these GPUs, for runs on CUDA 13, with the given facts in place of good facts."""
    listed = tuple(
        Gpu(index, f"GPU-{index}5c93b3a", name, 81559, 81004, "580.95.05", index in mig)
        for index, name in enumerate(names)
    )
    return replace(
        GpuMachine(
            gpus=listed,
            smi_error="",
            driver_cuda=(13, 0),
            torch="2.13.0",
            torch_cuda=(13, 0),
            shm_bytes=16 * 2**30,
            memory_bytes=2**40,
            variables={},
        ),
        **facts,
    )
