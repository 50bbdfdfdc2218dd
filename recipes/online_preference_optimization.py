"""Online preference optimization: the best and the worst of the policy's own responses form the pairs.

`python -m rl_plugins.recipes.online_preference_optimization model.path=... data.train_files=[...]`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import rl_plugins as rl
from rl_plugins.launch.command_line import recipe_main
from rl_plugins.recipes.grpo import build_prompts

if TYPE_CHECKING:
    from rl_plugins.launch.training import TrainingRun


def train(run: TrainingRun) -> None:
    """Train a policy on preferences between its own responses.

    Each training worker calls the function if the option `stage` is `online_preference_optimization`
    (`TrainingRun.call_recipe`).
    """
    config = run.config
    policy = rl.OnlinePreferenceOptimization(
        config.model.path,
        sampling=run.sampling(),
        updates_per_step=config.batch.updates_per_step,
        **run.preference_options(),
        **run.stage_options(),
    )
    run.fit(run.trainer(), policy, build_prompts(run))


if __name__ == "__main__":
    recipe_main("online_preference_optimization")
