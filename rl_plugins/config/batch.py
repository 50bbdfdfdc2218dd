"""Sizes of a step. The options set three numbers; the others follow and must be whole numbers."""

from __future__ import annotations

from rl_plugins.config.recipe import SAMPLING_STAGES, RecipeConfig
from rl_plugins.errors import ConfigError


def describe_batch(config: RecipeConfig) -> str:
    """Return the sizes of a step in one sentence."""
    batch, workers = config.batch, config.num_workers
    if config.stage not in SAMPLING_STAGES:
        return (
            f"{config.run.steps} steps of {batch.prompts_per_step} examples, {batch.prompts_per_step // workers} "
            f"on each of {workers} workers, in micro-batches of up to {batch.tokens_per_micro_batch} tokens"
        )
    samples = batch.prompts_per_step * batch.samples_per_prompt
    passes = f"{batch.passes_per_step} passes of " if batch.passes_per_step > 1 else ""
    return (
        f"{config.run.steps} RL steps of {batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples = "
        f"{samples} samples, {samples // workers} on each of {workers} workers, "
        f"{passes}{batch.updates_per_step} optimizer step(s) of {samples // batch.updates_per_step} samples, "
        f"in micro-batches of up to {batch.tokens_per_micro_batch} tokens"
    )


def check_batch(config: RecipeConfig) -> None:
    """Check that all workers and all optimizer steps get equal shares.

    Raises:
        ConfigError: A share is not a whole number. The message names the option, and the next number without this
            fault.
    """
    workers, batch = config.num_workers, config.batch
    if batch.prompts_per_step % workers:
        raise ConfigError(
            f"batch.prompts_per_step={batch.prompts_per_step} cannot be shared by {workers} workers: make it "
            f"{_next_multiple(batch.prompts_per_step, workers)}, or change placement.num_workers"
        )
    per_worker = batch.prompts_per_step // workers
    if config.stage in SAMPLING_STAGES and per_worker % batch.updates_per_step:
        fitting = _next_multiple(batch.prompts_per_step, workers * batch.updates_per_step)
        raise ConfigError(
            f"batch.updates_per_step={batch.updates_per_step} does not divide the {per_worker} prompts of each of "
            f"{workers} workers: make batch.prompts_per_step {fitting}, or change batch.updates_per_step"
        )


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of
