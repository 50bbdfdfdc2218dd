"""What a run needs, compared with this machine, where it is all there will be."""

from __future__ import annotations

import os
import re

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig, num_engines
from rl_plugins.launch.placement import check_fit, roles_of
from rl_plugins.launch.values import generates


def local_gpus() -> int:
    """NVIDIA GPUs of this machine, counted without loading a library."""
    return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))


def check_this_machine(config: RecipeConfig) -> None:
    """Compare the placement with this machine, where this machine is all there will be.

    Raises:
        ConfigError: `placement.device=cuda` without a GPU, or as `check_fit`.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    gpus = local_gpus()
    if config.placement.device == "cuda" and not gpus:
        raise ConfigError("placement.device=cuda, but this machine has no NVIDIA GPU: use placement.device=cpu or auto")
    if config.launcher == "ray":
        device = "cpu" if _on_cpu(config) else "cuda"
        available = {"CPU": float(os.cpu_count() or 1), "GPU": float(gpus)}
        check_fit(roles_of(config, device), [available], "this machine")
        if device == "cpu":
            _check_memory(config)


def slow_here(config: RecipeConfig) -> str | None:
    """What this machine, where it is all there will be, computes much slower than it might, and the way out."""
    from rl_plugins.processor import multiplies_bfloat16

    asked = {
        "model.precision=32-true": config.model.precision.startswith("bf16"),
        "rollout.dtype=float32": config.rollout.dtype == "bfloat16",
    }
    faster = " ".join(option for option, slow in asked.items() if slow)
    if not faster or os.environ.get("RAY_ADDRESS") or not _on_cpu(config) or multiplies_bfloat16():
        return None
    return f"this processor has no instructions for bfloat16, which may take many times as long: {faster} is faster"


def _on_cpu(config: RecipeConfig) -> bool:
    device = config.placement.device
    return device == "cpu" or (device == "auto" and not local_gpus())


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
