"""Memory and rates of devices.

Accelerators have the peaks of their data sheets and assumed shares of the peaks. The rates of a CPU are measured by
`python -m benchmarks.calibrate`, which writes the file `cpu.json` beside this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from rl_plugins.errors import ConfigError

CPU_FILE = Path(__file__).parent / "cpu.json"
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """An accelerator, or a whole machine without accelerators (`cpu`).

    On a CPU all processes share the memory, and each process has a core.

    Attributes:
        name: name in the table of devices.
        memory: bytes of memory.
        train_flops: operations per second of training, by dtype.
        sample_flops: operations per second of prefill and decoding, by dtype.
        sample_bandwidth: bytes of weights and KV cache per second read in decoding, by dtype.
        bandwidth: bytes per second from the memory of the device.
        link: bytes per second between devices of a machine, in each direction.
        network: bytes per second between machines, for each device.
        host_link: bytes per second to the memory of the host.
        decode_step_s: seconds of an engine for a decoding step, in addition to reading and multiplying.
        decode_sequence_s: seconds of an engine for each response in a decoding step, in addition to reading and
            multiplying.
        tensor_s: seconds of a pass with gradient for each tensor of the model, in addition to arithmetic.
        gather_s: seconds of DeepSpeed's own work in a ZeRO-3 pass for each tensor, in addition to communication.
        step_s: seconds of a step in addition to sampling, passes and weight updates.
        trainer_base: bytes of a training process without a model.
        engine_base: bytes of an engine process without weights.
        machine_base: bytes of all other processes of a run together: the driver and Ray.
        fragments: heap size of a process on a CPU, divided by the largest size of the live data of a pass.
        cores: number of cores of a CPU; 0 for an accelerator.
        alone: speed of a lone trainer, divided by its speed while all other cores train, too. The cores share the
            memory bandwidth.
    """

    name: str
    memory: float
    train_flops: Mapping[str, float]
    sample_flops: Mapping[str, float]
    sample_bandwidth: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    host_link: float
    decode_step_s: float = 0.004
    decode_sequence_s: float = 2e-5
    tensor_s: float = 2e-5
    gather_s: float = 5e-5
    step_s: float = 1.0
    trainer_base: float = 1.5 * GIB
    engine_base: float = 2.0 * GIB
    machine_base: float = 0.0
    fragments: float = 1.0
    cores: int = 0
    alone: float = 1.0

    @property
    def is_cpu(self) -> bool:
        """True if the device is a CPU, whose memory all processes share."""
        return self.cores > 0


TRAIN_SHARE, SAMPLE_SHARE, READ_SHARE, LINK_SHARE = 0.4, 0.5, 0.7, 0.8
"""Assumed shares of the peaks of an accelerator in training, in prefill, in decoding and in collectives."""


def _accelerator(name: str, gib: float, tflops: float, tb_s: float, link_gb_s: float) -> Device:
    peak = tflops * 1e12
    # Float32 runs as TF32, at half the rate of numbers of 16 bits.
    peaks = {"bfloat16": peak, "float16": peak, "float32": peak / 2}
    return Device(
        name,
        memory=gib * GIB,
        train_flops={dtype: rate * TRAIN_SHARE for dtype, rate in peaks.items()},
        sample_flops={dtype: rate * SAMPLE_SHARE for dtype, rate in peaks.items()},
        sample_bandwidth=dict.fromkeys(peaks, tb_s * 1e12 * READ_SHARE),
        bandwidth=tb_s * 1e12 * READ_SHARE,
        link=link_gb_s * 1e9 * LINK_SHARE,
        network=50e9 * LINK_SHARE,
        host_link=(50e9 if tb_s >= 3 else 25e9) * LINK_SHARE,
    )


DEVICES = {
    # name, GiB available to a process, dense bfloat16 TFLOPS, TB/s of the memory, GB/s to neighbours in each direction.
    # Source: NVIDIA's data sheets. Operations with sparsity are halved.
    device.name: device
    for device in (
        _accelerator("b200", 178, 2250, 8.0, 900),
        _accelerator("h200", 139, 989, 4.8, 450),
        _accelerator("h100", 79, 989, 3.35, 450),
        _accelerator("h20", 94, 148, 4.0, 450),
        _accelerator("a100", 79, 312, 2.04, 300),
        _accelerator("a100-40gb", 39, 312, 1.56, 300),
        _accelerator("l40s", 44, 362, 0.86, 32),
        _accelerator("a40", 44, 149.7, 0.70, 56),
        _accelerator("l4", 22, 121, 0.30, 32),
        _accelerator("4090", 23.5, 165.2, 1.01, 32),
    )
}
"""Accelerators by name."""


def device_named(name: str, cpu_file: Path = CPU_FILE) -> Device:
    """Return an accelerator of the table, or the CPU with measured rates.

    Args:
        name: name of an accelerator in any case, or `cpu`.
        cpu_file: file with the measured rates of the CPU.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "cpu":
        return read_cpu(cpu_file)
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    near = get_close_matches(name.lower(), DEVICES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known devices are {', '.join(DEVICES)} and cpu"
    raise ConfigError(f"device {name} is unknown: {hint}")


def read_cpu(path: Path) -> Device:
    """Read a file written by `benchmarks.calibrate`.

    Raises:
        ConfigError: the file is missing or has other content.
    """
    try:
        return Device(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"calibration file {path}: {error}; `python -m benchmarks.calibrate --output FILE` measures a machine"
        ) from None
