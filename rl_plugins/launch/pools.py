"""Pools of models of a configuration."""

from __future__ import annotations

from typing import Any

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.launch.placement import Reservation, Role
from rl_plugins.models.pool_actor import PoolConfig

Placed = tuple[PoolConfig, list[dict[str, Any]]]
"""Configuration of a pool, and Ray's options for each actor of the pool."""


def placed_pools(config: RecipeConfig, roles: list[Role], places: Reservation) -> dict[str, Placed]:
    """Return each pool by role, with Ray's options for the reserved resources."""
    by_name = {role.name: role for role in roles}
    pools = pool_configs(config, {role.name: bool(role.gpus) for role in roles})
    return {pool.role: (pool, places.options(by_name[pool.role])) for pool in pools}


def pool_configs(config: RecipeConfig, on_gpu: dict[str, bool]) -> list[PoolConfig]:
    """Return the configuration of each pool.

    Args:
        config: Configuration of the run.
        on_gpu: For each role, true if the actors of the role have GPUs.
    """
    models = {
        "reward_model": config.reward_model.path,
        "teacher": config.teacher.path,
        "reference": config.reference.path or config.model.path,
        "critic": config.critic.path or config.model.path,
    }
    return [
        PoolConfig(
            role=role,
            model=str(models[role]),
            head="scalar" if role in ("reward_model", "critic") else "causal_lm",
            dtype="float32" if config.model.precision == "32-true" else "bfloat16",
            actors=options.actors,
            device="cuda" if on_gpu[role] else "cpu",
            threads=max(1, int(options.cpus)),
            call_timeout_s=options.deadline_s,
        )
        for role, options in config.placement.pools.items()
    ]
