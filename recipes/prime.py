"""PRIME: `python -m rl_plugins.recipes.prime model.path=... data.train_files=[...]`.

The recipe of GRPO with a process reward model, which is trained beside the policy and gives each token a reward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra.utils import instantiate

import rl_plugins as rl
from rl_plugins.launch.command_line import recipe_main
from rl_plugins.recipes.grpo import build_prompts, build_stage

if TYPE_CHECKING:
    from rl_plugins.launch.training import TrainingRun


def train(run: TrainingRun) -> None:
    """Train a policy and a process reward model.

    Each training worker calls the function if the option `stage` is `prime` (`TrainingRun.call_recipe`).
    """
    process_reward_model = instantiate(run.config.process_reward_model, _convert_="all") or rl.ProcessRewardConfig()
    run.fit(run.trainer(), build_stage(run, process_reward_model), build_prompts(run))


if __name__ == "__main__":
    recipe_main("prime")
