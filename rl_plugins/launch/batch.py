"""The sizes of a step: three numbers are configured, the rest follows from them and must come out even."""

from __future__ import annotations

from rl_plugins.errors import ConfigError
from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.values import SAMPLING_STAGES


def num_workers(config: RecipeConfig) -> int:
    """Training workers: one under the local launcher."""
    return 1 if config.launcher == "local" else config.placement.num_workers


def describe_batch(config: RecipeConfig) -> str:
    """The sizes of a step in one sentence, the derived ones included."""
    batch, workers = config.batch, num_workers(config)
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
    """Check that workers and optimizer steps get equal shares.

    Raises:
        ConfigError: names the number to change, and the next one that fits.
    """
    workers, batch = num_workers(config), config.batch
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
