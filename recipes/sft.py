"""Supervised fine-tuning: `python -m rl_plugins.recipes.sft model.path=... data.train_files=[...]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rl_plugins as rl
from rl_plugins.launch.command_line import recipe_main

if TYPE_CHECKING:
    from rl_plugins.launch.training import TrainingRun


def train(run: TrainingRun) -> None:
    """Train a policy on given responses.

    Each training worker calls the function if the option `stage` is `sft` (`TrainingRun.call_recipe`).
    """
    config = run.config
    policy = rl.SFT(config.model.path, **run.validation_options(), **run.stage_options())
    responses = rl.SFTDataModule(
        run.training_data(),
        response_key=config.data.response_key,
        messages_key=config.data.messages_key,
        tools_key=config.data.tools_key,
        split_conversations=config.data.split_conversations,
        validate_on=config.data.validate_on,  # type: ignore[arg-type]  # checked by the record
        max_response_tokens=config.sampling.max_tokens,
        **run.data_options(),
    )
    run.fit(run.trainer(), policy, responses)


if __name__ == "__main__":
    recipe_main("sft")
