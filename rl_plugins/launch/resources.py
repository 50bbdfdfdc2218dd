"""What the placement needs, compared with what there is: Ray would wait for ever for what never comes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig, num_engines
from rl_plugins.launch.values import generates


def local_gpus() -> int:
    """NVIDIA GPUs of this machine, counted without loading a library."""
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))


def check_this_machine(config: RecipeConfig) -> None:
    """Compare the placement with this machine, where this machine is all there will be.

    Raises:
        ConfigError: `placement.device=cuda` without a GPU, or as `check_resources`.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    gpus, device = local_gpus(), config.placement.device
    if device == "cuda" and not gpus:
        raise ConfigError("placement.device=cuda, but this machine has no NVIDIA GPU: use placement.device=cpu or auto")
    if config.launcher == "ray":
        on_gpus = device == "cuda" or (device == "auto" and gpus > 0)
        available = {"CPU": os.cpu_count() or 1, "GPU": gpus}
        check_resources(config, "cuda" if on_gpus else "cpu", available, "this machine")
        if not on_gpus:
            _check_memory(config)


def _check_memory(config: RecipeConfig) -> None:
    """The engines write their whole KV caches once, when they start."""
    if config.rollout.engine != "vllm" or not generates(config):
        return
    engines, gib = num_engines(config), config.rollout.cpu_kv_cache_gib
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if engines * gib > total:
        raise ConfigError(
            f"the rollout engines need {engines * gib} GiB for their KV caches (rollout.engines={engines} x "
            f"rollout.cpu_kv_cache_gib={gib}), this machine has {total:.0f} GiB of memory: lower one of them"
        )


def check_resources(config: RecipeConfig, device: str, available: Mapping[str, float], where: str) -> None:
    """Compare what the placement needs with what `where` has.

    Raises:
        ConfigError: says required and available, and which options to lower.
    """
    placement, options = config.placement, f"placement.num_workers={config.placement.num_workers}"
    needed = [("CPU", placement.num_workers * placement.cpus_per_worker, f"{options} x placement.cpus_per_worker")]
    if device == "cuda":
        if num_engines(config) > 1:
            raise ConfigError(
                f"rollout.engines={config.rollout.engines}: several engines run on CPU only, and this run takes GPUs: "
                "use rollout.engines=1, with rollout.tensor_parallel_size for an engine on several GPUs"
            )
        engine = placement.engine_gpus * config.rollout.tensor_parallel_size if config.rollout.engine == "vllm" else 0
        workers = placement.num_workers * placement.gpus_per_worker
        needed.append(("GPU", workers + engine, f"{options} x placement.gpus_per_worker, and placement.engine_gpus"))
    for resource, amount, why in needed:
        if available.get(resource, 0) < amount:
            raise ConfigError(
                f"the placement needs {amount:g} {resource}s ({why}), {where} has {available.get(resource, 0):g}: "
                "lower these options, or use a larger cluster (RAY_ADDRESS)"
            )
