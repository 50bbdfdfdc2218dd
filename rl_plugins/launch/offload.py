"""Whether the engines can keep their states where `strategy.offload` says."""

from __future__ import annotations

import os
from dataclasses import asdict

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig

_FROZEN = ("reference", "reward_model", "teacher")


def places(config: RecipeConfig) -> dict[str, str]:
    """Engine to place."""
    return {engine: place for engine, place in asdict(config.strategy.offload).items() if engine != "folder"}


def check_offload(config: RecipeConfig) -> None:
    """Compare `strategy.offload` with the stage of ZeRO, the launcher and this machine.

    Raises:
        ConfigError: a place that is unknown or cannot be used here.
    """
    options = config.strategy.offload
    for engine, place in places(config).items():
        option = f"strategy.offload.{engine}={place}"
        frozen = engine in _FROZEN and not (engine == "reward_model" and config.stage == "reward_modeling")
        words = ("stay", "cpu", "nvme") if engine in _FROZEN else ("while_sampling", "stay", "cpu", "nvme")
        if place not in words:
            raise ConfigError(f"{option}: use one of {', '.join(words)}")
        if place not in ("cpu", "nvme"):
            continue
        if config.strategy.name == "fsdp":
            raise ConfigError(f"{option} is DeepSpeed's: use strategy.name=zero, or stay or while_sampling")
        if config.launcher == "local":
            raise ConfigError(f"{option}: launcher=local keeps all on one device; use launcher=ray, or leave it out")
        if config.strategy.zero_stage != 3 and (frozen or place == "nvme"):
            raise ConfigError(f"{option} needs strategy.zero_stage=3, not {config.strategy.zero_stage}")
        if place == "nvme" and not options.folder:
            raise ConfigError(f"{option} needs strategy.offload.folder, a folder on the drive")
    if places(config)["reference"] == "nvme" and config.reference.update_every:
        raise ConfigError("strategy.offload.reference=nvme: a reference that follows the policy cannot be in files")
    # On a cluster the workers look for themselves.
    if "nvme" in places(config).values() and not os.environ.get("RAY_ADDRESS"):
        from rl_plugins.strategies.offload import check_file_op

        check_file_op()
