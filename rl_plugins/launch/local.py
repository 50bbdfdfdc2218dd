"""Launcher `local`: training in this process, without Ray and vLLM, so that breakpoints work."""

from __future__ import annotations

import os

import psutil

from rl_plugins.config.recipe import RecipeConfig
from rl_plugins.run_folder import RunFolder


def train(config: RecipeConfig, folder: RunFolder, checkpoint: str | None) -> None:
    """Train in this process."""
    # transformers imports DeepSpeed to save a model, and DeepSpeed would print the selected device.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if config.on_gpus else "cpu")
    from rl_plugins.callbacks.progress import redraw_interval_s
    from rl_plugins.launch.training import TrainingRun, transformers_rollout
    from rl_plugins.rewards.inline import InlineScorer
    from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

    device = config.placement.device = "cuda" if config.on_gpus else "cpu"
    rollout, scorer = None, None
    if config.needs_engine:
        rollout = transformers_rollout(config, device)
    if config.generates:
        scorer = InlineScorer(
            config.reward.functions,
            deadline_s=config.reward.deadline_s,
            max_failure_rate=config.reward.max_failure_rate,
        )
    strategy = SingleDeviceRolloutStrategy(device, rollout=rollout)
    try:
        TrainingRun(
            config=config,
            folder=folder,
            strategy=strategy,
            scorer=scorer,
            checkpoint=checkpoint,
            in_ray=False,
            redraw_s=redraw_interval_s(),
            started=psutil.Process().create_time(),
            trainer_options={"accelerator": device},
        ).call_recipe()
    except SystemExit as ended:
        # Lightning silently turns Ctrl-C into SystemExit.
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise ended.__context__ from None
        raise
