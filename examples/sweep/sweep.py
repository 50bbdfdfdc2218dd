"""Search for a learning rate with Ray Tune: ASHA ends trials early by val/reward. See README.md.

python examples/sweep/sweep.py [--search optuna] OPTION=VALUE ...
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config, override

STEPS = 20
VALIDATE_EVERY = 5
METRIC, MODE = "val/reward", "max"


class ReportToTune(Callback):
    """Reports each validation to Tune, which may end the trial then."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            reward = float(trainer.callback_metrics[METRIC])
            tune.report({METRIC: reward, "step": getattr(pl_module, "step", 0)})


def train(trial: dict[str, Any]) -> None:
    """Run the recipe with the options of a trial."""
    options = [
        *trial["options"],
        f"optimizer.lr={trial['lr']}",
        # Hydra reads a name such as 12e45_00000 as a number.
        f"run.name=trial_{tune.get_context().get_trial_id()}",
        f"run.steps={STEPS}",
        f"run.eval_every={VALIDATE_EVERY}",
        "+callbacks.tune={_target_: sweep.ReportToTune}",
    ]
    run_recipe(parse_config(compose_config("grpo", options)))


def search_of(name: str) -> tuple[Any, Searcher | None, int]:
    """Return the values of the learning rate, the searcher and the number of trials.

    Args:
        name: `grid` for four fixed values; `optuna` for eight values, each of which Optuna chooses after the results so
            far.
    """
    if name == "grid":
        return tune.grid_search([1e-2, 1e-3, 1e-5, 1e-6]), None, 1
    from ray.tune.search.optuna import OptunaSearch

    return tune.loguniform(1e-6, 1e-2), OptunaSearch(metric=METRIC, mode=MODE, seed=0), 8


def main(search: str, options: list[str]) -> None:
    """Compare learning rates, two trials at a time, and print the best."""
    rates, searcher, trials = search_of(search)
    paths = Path.cwd()
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={
            "lr": rates,
            "options": [*options, override("run.output_dir", f"{paths}/outputs/sweep")],
        },
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode=MODE,
            search_alg=searcher,
            num_samples=trials,
            max_concurrent_trials=2,
            scheduler=ASHAScheduler(time_attr="step", max_t=STEPS, grace_period=VALIDATE_EVERY, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name="tune", storage_path=f"{paths}/outputs/sweep"),
    )
    results = tuner.fit()
    best = results.get_best_result()
    assert best.config is not None and best.metrics is not None
    for result in (results[index] for index in range(len(results))):
        metrics, config = result.metrics or {}, result.config or {}
        print(f"lr={config['lr']:g}: val/reward {metrics.get(METRIC, 0):.3f} after {metrics.get('step')} steps")
    print(f"best: lr={best.config['lr']:g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Search for a learning rate with Ray Tune.")
    parser.add_argument("--search", choices=("grid", "optuna"), default="grid", help="optuna needs: pip install optuna")
    parser.add_argument("options", nargs="*", help="options of the recipe, with absolute paths")
    arguments = parser.parse_args()
    main(arguments.search, arguments.options)
