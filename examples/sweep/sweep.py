"""Search for a learning rate with Ray Tune: ASHA ends trials early by val/reward. See README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.command_line import compose_config, run_recipe

STEPS = 20
VALIDATE_EVERY = 5


class ReportToTune(Callback):
    """Reports each validation to Tune, which may end the trial then."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            reward = float(trainer.callback_metrics["val/reward"])
            tune.report({"val/reward": reward, "step": getattr(pl_module, "step", 0)})


def train(trial: dict[str, Any]) -> None:
    """Run the recipe with the options of a trial."""
    options = [
        *trial["options"],
        f"optimizer.lr={trial['lr']}",
        f"run.name={tune.get_context().get_trial_id()}",
        f"run.steps={STEPS}",
        f"run.eval_every={VALIDATE_EVERY}",
        "+callbacks.tune={_target_: sweep.ReportToTune}",
    ]
    run_recipe(parse_config(compose_config("grpo", options)))


def main(options: list[str]) -> None:
    """Compare four learning rates, two trials at a time, and print the best."""
    paths = Path.cwd()
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={
            "lr": tune.grid_search([1e-2, 1e-3, 1e-5, 1e-6]),
            "options": [*options, f"run.output_dir={paths}/outputs/sweep"],
        },
        tune_config=tune.TuneConfig(
            metric="val/reward",
            mode="max",
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
        print(f"lr={config['lr']:g}: val/reward {metrics.get('val/reward', 0):.3f} after {metrics.get('step')} steps")
    print(f"best: lr={best.config['lr']:g}")


if __name__ == "__main__":
    main(sys.argv[1:])
