"""Size of the object store of a Ray that a run starts: room for the samples of the steps in flight."""

from __future__ import annotations

from pathlib import Path

import psutil

from rl_plugins.config.recipe import RecipeConfig

LEAST_BYTES = 512 * 2**20
_SAMPLE_BYTES = 32
"""Bytes of a token between sampler, rewards and workers: id, log-prob and text, pickled."""
_POOL_BYTES = 48
"""Bytes of a token between workers and a model in actors: ids, positions, masks and the result."""
_LIKELIEST_BYTES = 12
"""Bytes of one of the teacher's most likely tokens: id and log-prob."""
_SHARED_MEMORY = Path("/dev/shm")
_SHARE_OF_SHARED, _SHARE_OF_MEMORY = 0.8, 0.3


def object_store_bytes(config: RecipeConfig) -> int:
    """Return the size for `ray.init`: what the samples of the steps in flight need, as far as this machine has it.

    Ray takes the memory when objects need it, and writes further objects to the disk.
    """
    pools = config.placement.pools
    per_token = _SAMPLE_BYTES + _POOL_BYTES * len(pools)
    if "teacher" in pools and isinstance(config.algorithm, dict):
        per_token += _LIKELIEST_BYTES * int(config.algorithm.get("teacher_top_k", 0))
    longest = config.data.max_prompt_tokens + max(config.environment.max_turns, 1) * config.sampling.max_tokens
    samples = config.schedule.in_flight(config.prompts_drawn) * config.batch.samples_per_prompt
    room = _SHARE_OF_MEMORY * psutil.virtual_memory().available
    if _SHARED_MEMORY.is_dir():
        room = min(room, _SHARE_OF_SHARED * psutil.disk_usage(str(_SHARED_MEMORY)).free)
    return max(LEAST_BYTES, min(samples * longest * per_token, int(room)))
