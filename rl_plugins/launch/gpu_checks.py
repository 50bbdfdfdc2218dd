"""Checks of the GPUs of a run: each fault is one message with the way out, before a model is loaded.

A machine is described by the facts of `gpus.read_machine`. On a cluster, a task on each machine with GPUs reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.errors import ConfigError, DeadlineExceeded
from rl_plugins.hub.files import model_folder
from rl_plugins.launch.gpus import ALLOCATOR, VISIBLE, Gpu, GpuMachine, Version, read_machine
from rl_plugins.model_json import read_model_config
from rl_plugins.planning.shape import shape_of

_OLDEST_DRIVERS = {12: "525", 13: "580"}
"""Oldest driver for each major version of CUDA, by NVIDIA's table of minor-version compatibility."""
LEAST_SHM_BYTES = 2**30
_ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Fault:
    """A fact about a machine against runs on GPUs.

    Attributes:
        part: part of the machine, as `rl-plugins doctor` names it.
        found: clause with the fault.
        fix: clause with the way out.
    """

    part: str
    found: str
    fix: str


def faults_of_software(machine: GpuMachine) -> Iterator[Fault]:
    """Yield the faults of driver and torch, which stop every run on GPUs."""
    if machine.torch and machine.torch_cuda is None:
        yield Fault(
            "CUDA of torch",
            f"torch {machine.torch} is built for CPUs",
            "install requirements/cuda.lock.txt into a fresh environment (docs/gpus.md)",
        )
    elif machine.torch_cuda and (machine.driver_cuda or (0, 0)) < (machine.torch_cuda[0], 0):
        yield Fault(
            "GPU driver",
            f"{driver_words(machine)}, and torch {machine.torch} needs CUDA {version_words(machine.torch_cuda)}",
            f"install driver {_OLDEST_DRIVERS.get(machine.torch_cuda[0], 'of this CUDA version')} or newer",
        )


def faults_of_devices(machine: GpuMachine) -> Iterator[Fault]:
    """Yield the faults of GPUs, variables and shared memory, which stop runs of several processes on GPUs."""
    if machine.smi_error:
        yield Fault(
            "GPU",
            f"nvidia-smi fails ({' '.join(machine.smi_error.split())})",
            "repair the driver; a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    parts = [str(gpu.index) for gpu in machine.visible if gpu.mig]
    variable = machine.variables.get(VISIBLE)
    if parts or "MIG-" in (variable or ""):
        divided = (
            f"GPU {' and '.join(parts)} is divided by MIG" if parts else f"{VISIBLE}={variable} names parts of a GPU"
        )
        yield Fault(
            "GPU",
            f"{divided}, and NCCL and CUDA IPC do not connect the parts",
            f"switch MIG off (nvidia-smi -mig 0), or choose whole GPUs with {VISIBLE}",
        )
    elif len(machine.visible) < machine.counted_by_ray or (machine.gpus and not machine.visible):
        yield Fault(
            VISIBLE,
            f"{VISIBLE}={variable} shows {len(machine.visible)} of {len(machine.gpus)} GPUs, and Ray counts "
            f"{machine.counted_by_ray}",
            "name each GPU once, by a number of nvidia-smi, or unset the variable; an empty value hides all GPUs",
        )
    if len(kinds(machine.visible)) > 1:
        yield _different_kinds(machine.visible)
    if machine.shm_bytes < LEAST_SHM_BYTES:
        yield Fault(
            "/dev/shm",
            f"/dev/shm has {machine.shm_bytes // 2**20} MiB, and NCCL, Ray and vLLM need at least 1 GiB",
            "start the container with --shm-size=16g (Kubernetes: mount an emptyDir of medium Memory there)",
        )


def check_gpus(config: RecipeConfig, machines: Mapping[str, GpuMachine]) -> None:
    """Check the machines of a run on GPUs.

    Args:
        config: configuration of the run.
        machines: facts about each machine with GPUs, by words for the machine, such as "this machine".

    Raises:
        ConfigError: a machine has a fault, or the GPUs of the machines differ.
    """
    for where, machine in machines.items():
        for fault in faults_of_software(machine):
            raise ConfigError(f"{where}: {fault.found}: {fault.fix}, or use placement.device=cpu")
        if config.launcher == "ray":
            for fault in (*faults_of_devices(machine), *_faults_of_ipc(config, machine)):
                raise ConfigError(f"{where}: {fault.found}: {fault.fix}")
    if config.launcher == "ray":
        gpus = [gpu for machine in machines.values() for gpu in machine.visible]
        if len(kinds(gpus)) > 1:
            fault = _different_kinds(gpus)
            raise ConfigError(f"{' and '.join(machines)}: {fault.found}: {fault.fix}")


def check_engine_weights(
    config: RecipeConfig, model: Mapping[str, Any], machine: GpuMachine, elsewhere: int = 0
) -> None:
    """Compare the weights of the rollout engines with the memory of a machine. Unknown architectures are not checked.

    Args:
        config: configuration of the run.
        model: content of the policy's config.json.
        machine: facts about the machine, whose GPUs are of one kind.
        elsewhere: number of GPUs of other machines, which may have workers in place of this machine.

    Raises:
        ConfigError: the weights leave no memory of the GPU for a KV cache, or sleeping engines would keep more weights
            than the host has memory. The message has both numbers.
    """
    rollout, gpus = config.rollout, machine.visible
    if not config.needs_vllm or rollout.quantizes or not gpus or not gpus[0].memory_mib:
        return
    try:
        parameters = shape_of(model, "config.json").parameters
    except ConfigError:
        return
    size, share = rollout.tensor_parallel_size, config.engine_limits["gpu_memory_utilization"]
    width = 4 if config.rollout_dtype == "float32" else 2
    weights, total = parameters * width / size / 2**30, gpus[0].memory_mib / 2**10
    sleeping = min(len(gpus), max(0, config.placement.num_workers - elsewhere))
    host = machine.memory_bytes / 2**30
    # The least: PyTorch rounds each pinned allocation up to a power of two.
    on_host = weights * sleeping
    if sleeping and config.placement.rollout == "colocated" and config.rollout_sleep == "kv_cache" and on_host >= host:
        raise ConfigError(
            f"rollout.sleep=kv_cache: engines of {sleeping} GPUs would keep {on_host:.1f} GiB of weights in the "
            f"{host:.1f} GiB of host memory: raise rollout.tensor_parallel_size, or use rollout.sleep=all (for an "
            "adapter, with rollout.lora=merged)"
        )
    # With `kv_cache_memory_bytes`, the engine has no share.
    if not rollout.vllm.get("kv_cache_memory_bytes") and weights >= share * total:
        raise ConfigError(
            f"rollout.gpu_memory_utilization={share:g}: an engine has {share * total:.1f} of the {total:.1f} GiB of a "
            f"GPU, but its weights take {weights:.1f} GiB there ({config.rollout_dtype}, "
            f"rollout.tensor_parallel_size={size}): raise one of the two options"
        )


def check_nodes(config: RecipeConfig, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Check the machines of a Ray cluster for a run on GPUs. Ray must be initialized.

    Args:
        config: configuration of the run.
        nodes: Ray's description of each living machine.

    Raises:
        ConfigError: a machine has a fault, Ray counts more GPUs than CUDA shows there, the GPUs differ, or the weights
            of the rollout engines do not fit (`check_engine_weights`).
        DeadlineExceeded: a machine did not answer.
    """
    machines = {}
    for node in nodes:
        counted = node["Resources"].get("GPU", 0)
        if not counted:
            continue
        where = f"machine {node['NodeManagerAddress']}"
        machines[where] = machine = _read_node(node["NodeID"], where)
        if not machine.smi_error and counted > len(machine.visible):
            raise ConfigError(
                f"{where}: Ray counts {counted:g} GPUs, but CUDA shows {len(machine.visible)} of the "
                f"{len(machine.gpus)} GPUs there ({VISIBLE}={machine.variables.get(VISIBLE, 'not set')}): start Ray "
                f"with --num-gpus={len(machine.visible)}, or correct the variable before ray start"
            )
    check_gpus(config, machines)
    if config.needs_vllm and machines:
        model = read_model_config(Path(model_folder(config.model.path, weights=False), "config.json"))
        total = sum(len(machine.visible) for machine in machines.values())
        for machine in machines.values():
            check_engine_weights(config, model, machine, elsewhere=total - len(machine.visible))


def kinds(gpus: Sequence[Gpu]) -> Counter[str]:
    """Return the number of GPUs of each product."""
    return Counter(gpu.name for gpu in gpus)


def kinds_words(gpus: Sequence[Gpu]) -> str:
    """Return the products of GPUs as words, such as "8 x NVIDIA H100 80GB HBM3"."""
    return ", ".join(f"{count} x {name}" for name, count in kinds(gpus).items())


def driver_words(machine: GpuMachine) -> str:
    """Return the versions of the driver and of its CUDA."""
    driver = f"driver {machine.gpus[0].driver}" if machine.gpus else "the driver"
    return f"{driver} runs CUDA {version_words(machine.driver_cuda)}" if machine.driver_cuda else "libcuda is missing"


def version_words(version: Version) -> str:
    """Return a version as text, such as "13.0"."""
    return ".".join(map(str, version))


def _different_kinds(gpus: Sequence[Gpu]) -> Fault:
    return Fault(
        "GPU",
        f"the GPUs are of different kinds ({kinds_words(gpus)}), and a run needs GPUs of one kind",
        f"choose GPUs by their numbers in nvidia-smi with CUDA_DEVICE_ORDER=PCI_BUS_ID and {VISIBLE}, or use machines "
        "of one kind",
    )


def _faults_of_ipc(config: RecipeConfig, machine: GpuMachine) -> Iterator[Fault]:
    uses_ipc = config.placement.rollout == "colocated" and config.rollout.transport in ("auto", "ipc")
    if not uses_ipc or not config.needs_vllm:
        return
    for name in ALLOCATOR:
        if "expandable_segments:true" in machine.variables.get(name, "").lower().replace(" ", ""):
            yield Fault(
                name,
                f"{name}={machine.variables[name]} makes memory that containers often refuse to share by CUDA IPC",
                "leave expandable_segments out, or use placement.rollout=split",
            )


def _read_node(node: str, where: str) -> GpuMachine:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    task: Any = ray.remote(read_machine).options(num_cpus=0, scheduling_strategy=there)
    try:
        machine: GpuMachine = ray.get(task.remote(), timeout=_ANSWER_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise DeadlineExceeded(f"the run waited {_ANSWER_TIMEOUT_S:.0f} s for {where} to describe its GPUs") from None
    return machine
