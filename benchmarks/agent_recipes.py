"""SFT and GRPO of an agent recipe on made-up data, with the held-out rewards: parts of the benchmarks of agents."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_plugins.config.recipe import parse_config
from rl_plugins.data.prepare.files import RowList, write_splits
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.terminal import quiet_libraries
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import read_metrics

Series = Mapping[str, Mapping[int, float]]
LOCAL = ["launcher=local", "rollout.engine=transformers"]


@dataclass(frozen=True)
class Setting:
    """Settings of a benchmark from the command line.

    Attributes:
        seeds: seeds of data, model and training.
        sft_steps: largest number of SFT steps; None for the number of the recipe.
        grpo_steps: largest number of GRPO steps; None for the number of the recipe.
        is_local: True to train by GRPO in one process, without Ray and vLLM.
    """

    seeds: Sequence[int]
    sft_steps: int | None
    grpo_steps: int | None
    is_local: bool

    def options(self, stage: str) -> list[str]:
        """Return the options of a stage."""
        steps = {"sft": self.sft_steps, "grpo": self.grpo_steps}[stage]
        local = LOCAL if self.is_local and stage == "grpo" else []
        return [*local, *([] if steps is None else [f"run.steps={steps}"])]


def read_setting(description: str | None) -> Setting:
    """Read the command line, and silence the libraries."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="largest number of GRPO steps (default: of the recipe)")
    parser.add_argument("--sft-steps", type=int, help="largest number of SFT steps (default: of the recipe)")
    parser.add_argument("--launcher", choices=("ray", "local"), default="ray")
    arguments = parser.parse_args()
    quiet_libraries()
    return Setting(arguments.seeds, arguments.sft_steps, arguments.steps, arguments.launcher == "local")


def measure_agent(
    name: str,
    splits: Mapping[str, RowList],
    seed: int,
    setting: Setting,
    shown: Mapping[str, str],
    further: Sequence[str] = (),
) -> str:
    """Train in a temporary folder, and return a line with metrics before and after GRPO, and with the time.

    Args:
        name: name of the recipe, such as `game`.
        splits: rows of the splits `sft`, `dev`, `train` and `test`.
        seed: seed of model and training.
        setting: settings of the benchmark.
        shown: metric of validation for each name in the line.
        further: options of both stages.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        series = train_agent(name, splits, Path(folder), seed, setting, further=further)
    values = ", ".join(f"{words} {before_and_after(series, metric)}" for words, metric in shown.items())
    return f"{values} in {duration(series)}, {time.perf_counter() - start:.0f} s in all"


def train_agent(
    name: str,
    splits: Mapping[str, RowList],
    folder: Path,
    seed: int,
    setting: Setting,
    *,
    further: Sequence[str] = (),
) -> Series:
    """Train a tiny model with both stages of an agent recipe, and return the metrics of GRPO.

    Args:
        name: name of the recipe, such as `game`.
        splits: rows of the splits `sft`, `dev`, `train` and `test`.
        folder: folder for data, models and runs.
        seed: seed of model and training.
        setting: settings of the benchmark.
        further: options of both stages.
    """
    data = folder / "data"
    write_splits(splits, data)
    save_tiny_policy(folder / "base", seed=seed, tools=True)
    common = [f"run.output_dir={folder}", f"run.seed={seed}", "tracking.enabled=false", *further]
    files = {"sft": ("sft", "dev"), "grpo": ("train", "test")}
    for stage, model in (("sft", "base"), ("grpo", f"{name}_sft/policy")):
        train, held_out = files[stage]
        options = [
            f"model.path={folder / model}", f"data.train_files=[{data}/{train}.parquet]",
            f"data.val_files=[{data}/{held_out}.parquet]", *common, *setting.options(stage),
        ]  # fmt: skip
        run_recipe(parse_config(compose_config(f"{name}_{stage}", options)))
    return read_metrics(folder / f"{name}_grpo" / "metrics.jsonl")


def before_and_after(series: Series, metric: str) -> str:
    """Return the first and the last value of a metric of validation, such as `0.212 -> 0.943`."""
    values = list(series[f"val/{metric}"].values())
    return f"{values[0]:.3f} -> {values[-1]:.3f}"


def duration(series: Series) -> str:
    """Return the number of steps, and the median of their seconds."""
    steps = sorted(series["time/step"].values())
    return f"{len(steps)} steps of {steps[len(steps) // 2]:.2f} s"
