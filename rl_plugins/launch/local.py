"""Launcher `local`: training in this process, without Ray and vLLM, so that breakpoints work."""

from __future__ import annotations

import os

import psutil

from rl_plugins.config.recipe import RecipeConfig, write_config
from rl_plugins.run_folder import RunFolder


def train(config: RecipeConfig, folder: RunFolder, checkpoint: str | None) -> None:
    """Train in this process."""
    # transformers imports DeepSpeed to save a model, and DeepSpeed would print the selected device.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if config.on_gpus else "cpu")
    from rl_plugins.callbacks.progress import redraw_interval_s
    from rl_plugins.launch.training import TrainingRun, scorer_of, transformers_rollout
    from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy

    device = "cuda" if config.on_gpus else "cpu"
    config.set_device(device)
    write_config(config, folder.config)
    strategy = SingleDeviceRolloutStrategy(device, rollout=transformers_rollout(config, device))
    try:
        TrainingRun(
            config=config,
            folder=folder,
            strategy=strategy,
            scorer=scorer_of(config),
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
