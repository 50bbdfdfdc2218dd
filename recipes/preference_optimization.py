"""Preference optimization (DPO, IPO, KTO and others) on given responses.

`python -m rl_plugins.recipes.preference_optimization model.path=... data.train_files=[...]`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import rl_plugins as rl
from rl_plugins.launch.command_line import recipe_main

if TYPE_CHECKING:
    from rl_plugins.launch.training import TrainingRun


def train(run: TrainingRun) -> None:
    """Train a policy on preferences.

    Each training worker calls the function if the option `stage` is `preference_optimization`
    (`TrainingRun.call_recipe`).
    """
    policy = rl.PreferenceOptimization(run.config.model.path, **run.preference_options(), **run.stage_options())
    run.fit(run.trainer(), policy, build_pairs(run, run.config.data.validate_on))


def build_pairs(run: TrainingRun, validate_on: str) -> rl.PreferenceDataModule:
    """Return pairs of responses, or responses with labels."""
    data = run.config.data
    return rl.PreferenceDataModule(
        run.training_data(),
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        margin_key=data.margin_key,
        label_key=data.label_key,
        response_key=data.response_key,
        validate_on=validate_on,  # type: ignore[arg-type]  # checked by the record
        max_response_tokens=run.config.sampling.max_tokens,
        **run.data_options(),
    )


if __name__ == "__main__":
    recipe_main("preference_optimization")
