"""Reward models: `python -m rl_plugins.recipes.reward_modeling model.path=... data.train_files=[...]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rl_plugins as rl
from rl_plugins.launch.command_line import recipe_main
from rl_plugins.recipes.preference_optimization import build_pairs

if TYPE_CHECKING:
    from rl_plugins.launch.training import TrainingRun


def train(run: TrainingRun) -> None:
    """Train a reward model on pairs or on labelled steps.

    Each training worker calls the function if the option `stage` is `reward_modeling` (`TrainingRun.call_recipe`).
    """
    config = run.config
    reward_model = rl.RewardModeling(
        config.model.path,
        loss=config.loss.name or "bradley_terry",
        loss_options=config.loss.options,
        **run.stage_options(),
    )
    by_steps = config.loss.name == "process_reward"
    run.fit(run.trainer(), reward_model, build_steps(run) if by_steps else build_pairs(run, validate_on="responses"))


def build_steps(run: TrainingRun) -> rl.ProcessRewardDataModule:
    """Return responses in steps, with a label for each step."""
    config = run.config
    return rl.ProcessRewardDataModule(
        run.training_data(),
        steps_key=config.data.steps_key,
        labels_key=config.data.labels_key,
        max_response_tokens=config.sampling.max_tokens,
        **run.data_options(),
    )


if __name__ == "__main__":
    recipe_main("reward_modeling")
