"""GRPO and other policy optimization: `python -m rl_plugins.recipes.grpo model.path=... data.train_files=[...]`.

The option `algorithm=NAME` chooses a file of `conf/algorithm`; `--help` lists the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra.utils import instantiate

import rl_plugins as rl
from rl_plugins.launch.command_line import recipe_main

if TYPE_CHECKING:
    from rl_plugins.launch.training import TrainingRun


def train(run: TrainingRun) -> None:
    """Train a policy with rewards for its own responses.

    Each training worker calls the function if the option `stage` is `policy_optimization` (`TrainingRun.call_recipe`).
    """
    run.fit(run.trainer(), build_stage(run), build_prompts(run))


def build_stage(run: TrainingRun, process_reward_model: rl.ProcessRewardConfig | None = None) -> rl.PolicyOptimization:
    """Return the stage: the policy, the models beside the policy, and the algorithm."""
    config = run.config
    return rl.PolicyOptimization(
        config.model.path,
        algorithm=instantiate(config.algorithm, _convert_="all"),
        sampling=run.sampling(),
        reference=config.reference.path,
        teacher=config.teacher,
        critic=config.critic,
        reward_model=run.reward_model(),
        cost_critic=config.cost_critic,
        cost_model=run.cost_model(),
        process_reward_model=process_reward_model,
        schedule=config.schedule,
        updates_per_step=config.batch.updates_per_step,
        passes_per_step=config.batch.passes_per_step,
        router_replay=config.model.router_replay,
        **run.generation_options(),
        **run.stage_options(),
    )


def build_prompts(run: TrainingRun) -> rl.PromptDataModule:
    """Return the prompts of training and validation."""
    return rl.PromptDataModule(run.training_data(), curriculum=run.config.data.curriculum, **run.data_options())


if __name__ == "__main__":
    recipe_main("grpo")
