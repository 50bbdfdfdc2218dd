"""What is known of devices: memory and peak rates from data sheets, and what share of them is reached.

Rates of a CPU are measured (`python -m benchmarks.calibrate`), and lie in a file beside this one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from rl_plugins.errors import ConfigError

CPU_FILE = Path(__file__).parent / "cpu.json"
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator; of `cpu`, one machine whose processes share its memory and have a core each.

    Attributes:
        name: in the table.
        memory: bytes.
        train_flops: operations a second that training reaches, by the name of the dtype.
        sample_flops: the same, of prefill and decoding.
        bandwidth: bytes a second from memory.
        sample_bandwidth: bytes of weights and KV cache a second that decoding gets through, by the dtype.
        link: bytes a second between devices of a machine, each way.
        network: bytes a second between machines, for each device.
        host_link: bytes a second to the host's memory.
        decode_step_s: what an engine takes for a step of decoding besides reading and multiplying.
        decode_sequence_s: the same, for each response that the step goes on with.
        tensor_s: what a pass with a gradient takes for each tensor of the model besides arithmetic.
        gather_s: what a pass takes under ZeRO-3 for each tensor besides moving it: DeepSpeed's own work.
        step_s: what a step takes besides sampling, passes and updates.
        trainer_base: bytes of a training process before it has a model.
        engine_base: bytes of an engine's process before it has weights.
        machine_base: bytes of all other processes of a run together: the driver, Ray.
        fragments: how much larger the heap of a process on a CPU is than what passes have at once.
        cores: of a CPU; 0 of an accelerator.
        alone: by how much a trainer is faster than one beside which all other cores train, too: they share the memory.
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
        """Whether processes share its memory."""
        return self.cores > 0


TRAIN_SHARE, SAMPLE_SHARE, READ_SHARE, LINK_SHARE = 0.4, 0.5, 0.7, 0.8
"""Shares of the peaks of an accelerator that training, prefill, decoding and collectives are taken to reach."""


def _accelerator(name: str, gib: float, tflops: float, tb_s: float, link_gb_s: float) -> Device:
    peak = tflops * 1e12
    return Device(
        name,
        memory=gib * GIB,
        # Float32 runs as TF32, at half the rate.
        train_flops={"bfloat16": peak * TRAIN_SHARE, "float32": peak / 2 * TRAIN_SHARE},
        sample_flops={"bfloat16": peak * SAMPLE_SHARE, "float32": peak / 2 * SAMPLE_SHARE},
        sample_bandwidth=dict.fromkeys(("bfloat16", "float32"), tb_s * 1e12 * READ_SHARE),
        bandwidth=tb_s * 1e12 * READ_SHARE,
        link=link_gb_s * 1e9 * LINK_SHARE,
        network=50e9 * LINK_SHARE,
        host_link=(50e9 if tb_s >= 3 else 25e9) * LINK_SHARE,
    )


DEVICES = {
    # name: GiB that a process can have, dense bfloat16 TFLOPS, TB/s of its memory, GB/s to its neighbours each way.
    # NVIDIA's data sheets; where they give operations with sparsity, half of them.
    one.name: one
    for one in (
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
    """An accelerator of the table, or `cpu` with the rates of its file.

    Raises:
        ConfigError: there is none of this name.
    """
    if name == "cpu":
        return read_cpu(cpu_file)
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    near = get_close_matches(name.lower(), DEVICES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(DEVICES)} and cpu"
    raise ConfigError(f"--device {name}: nothing is known of it; {hint}")


def read_cpu(path: Path) -> Device:
    """What `benchmarks.calibrate` has written.

    Raises:
        ConfigError: the file is not there, or is none of its.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {one.name for one in fields(Device)}
        return Device(**{key: value for key, value in values.items() if key in known})
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise ConfigError(
            f"--calibration {path}: {error}; `python -m benchmarks.calibrate --output FILE` measures a machine"
        ) from None
