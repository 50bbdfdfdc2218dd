"""Launcher `local`: training in this process, without Ray and vLLM, so that breakpoints work."""

from __future__ import annotations

import os

import psutil

from rl_plugins.launch.config import RecipeConfig
from rl_plugins.launch.values import generates, needs_engine
from rl_plugins.run_folder import RunFolder


def train(config: RecipeConfig, folder: RunFolder, checkpoint: str | None) -> None:
    """Train in this process."""
    # transformers imports DeepSpeed to save a model, and DeepSpeed would print the selected device.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if config.placement.device == "cuda" else "cpu")
    from rl_plugins.callbacks.progress import redraw_interval_s
    from rl_plugins.launch.build import dtype_of, fit
    from rl_plugins.rewards.inline import InlineScorer
    from rl_plugins.rollout.transformers_engine import TransformersRollout
    from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

    device = "cuda" if config.placement.device == "cuda" else "cpu"
    rollout, scorer = None, None
    if needs_engine(config):
        rollout = TransformersRollout(
            config.model.path, dtype=dtype_of(config), device=device, check_updates=config.rollout.check_updates
        )
    if generates(config):
        scorer = InlineScorer(
            config.reward.functions,
            deadline_s=config.reward.deadline_s,
            max_failure_rate=config.reward.max_failure_rate,
        )
    strategy = SingleDeviceRolloutStrategy(device, rollout=rollout)
    try:
        fit(
            config, folder, strategy, scorer, checkpoint,
            in_ray=False, redraw_s=redraw_interval_s(), started=psutil.Process().create_time(), accelerator=device,
        )  # fmt: skip
    except SystemExit as ended:
        # Lightning silently turns Ctrl-C into SystemExit.
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise ended.__context__ from None
        raise
