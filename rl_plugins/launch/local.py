"""Training with the launcher `local`: this process is the only training worker.

There is no Ray and no vLLM, so breakpoints work.
"""

from __future__ import annotations

import os

import psutil

from rl_plugins.config.recipe import RecipeConfig, write_config
from rl_plugins.intact_checkpoint import newest_intact
from rl_plugins.launch.rollout_engines import transformers_rollout
from rl_plugins.launch.scorer import scorer_of
from rl_plugins.launch.terminal import redraw_interval_s
from rl_plugins.launch.training import TrainingRun
from rl_plugins.run_folder import RunFolder
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy


def train_in_this_process(config: RecipeConfig, folder: RunFolder) -> None:
    """Train with the launcher `local`.

    Args:
        config: options of the run.
        folder: folder of the run.
    """
    device = "cuda" if config.on_gpus else "cpu"
    # transformers imports DeepSpeed to save a model, and DeepSpeed would print the selected device.
    os.environ.setdefault("DS_ACCELERATOR", device)
    config.set_device(device)
    # Again, with the device in place of `auto`.
    write_config(config, folder.config)
    scorer = scorer_of(config)
    run = TrainingRun(
        config=config,
        folder=folder,
        strategy=SingleDeviceRolloutStrategy(device, rollout=transformers_rollout(config, device)),
        scorer=scorer,
        checkpoint=newest_intact(folder),
        in_ray=False,
        redraw_s=redraw_interval_s(),
        started=psutil.Process().create_time(),
        trainer_options={"accelerator": device, "devices": 1},
    )
    try:
        run.call_recipe()
    except SystemExit as ended:
        # Lightning silently turns Ctrl-C into SystemExit.
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise ended.__context__ from None
        raise
    finally:
        if scorer is not None:
            scorer.close()
