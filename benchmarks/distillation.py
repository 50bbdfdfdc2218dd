"""Distillation: a policy learns from two teachers that know half of a task each, and from its own earlier self.

`python -m benchmarks.distillation [--seeds 0 1 2] [--folder DIR]` makes the data, the tiny model and the SFT start of
the quickstart. Sums with an even and with an odd first number are two data sources. SFT on one source alone makes a
teacher of this source. Then the start learns from the teachers without a reward, and from the reward with and without
its own earlier self as a teacher. All runs are in this process, without Ray and vLLM. The program prints the held-out
accuracy of each source, and exits with 1 if two teachers have not taught both sources.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from rl_plugins.config.recipe import parse_config
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.data.prepare.tasks import addition_rows
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.quickstart import NUM_DEV, NUM_TEST, NUM_TRAIN, save_base
from rl_plugins.run_folder import read_metrics

SOURCES = ("even", "odd")
SFT_STEPS, STEPS = 400, 150
LEAST_GAIN = 0.15
BOTH = "from both teachers"
TAUGHT = "algorithm=on_policy_distillation"
RUNS: dict[str, tuple[str, ...]] = {
    "from the teacher of even sums": (TAUGHT, "teacher.path=FOLDER/even/policy"),
    BOTH: (TAUGHT, "++teacher.paths={even: FOLDER/even/policy, odd: FOLDER/odd/policy}"),
    "from rewards": (),
    "from rewards and its earlier self": (
        TAUGHT, "algorithm.advantage_options.reward_weight=1", "teacher.update_every=10",
    ),
}  # fmt: skip
"""Options of each run after SFT."""

Accuracy = dict[str, float]


def write_data(folder: Path, seed: int) -> None:
    """Write the sums of the quickstart with two data sources, and the training rows of each source."""
    splits = addition_rows(below=50, num_train=NUM_TRAIN, num_dev=NUM_DEV, num_test=NUM_TEST, seed=seed)
    for rows in splits.values():
        for row in rows:
            first, _ = row["prompt"][0]["content"].split("+")
            row["data_source"] = SOURCES[int(first) % 2]
    parts = {source: [row for row in splits["train"] if row["data_source"] == source] for source in SOURCES}
    write_splits({**splits, **parts}, folder)


def train(name: str, recipe: str, model: str, folder: Path, seed: int, *options: str) -> Accuracy:
    """Train, and return the held-out accuracy of each source after training."""
    common = [
        f"run.name={name}", f"run.output_dir={folder}", f"run.seed={seed}", f"model.path={folder}/{model}",
        f"data.val_files=[{folder}/data/test.parquet]", "run.checkpoint_every=100000", "run.eval_before=false",
        "tracking.enabled=false", "launcher=local", "rollout.engine=transformers", "placement.device=cpu",
    ]  # fmt: skip
    run_recipe(parse_config(compose_config(recipe, [*common, *options])))
    series = read_metrics(folder / name / "metrics.jsonl")
    return {source: list(series[f"val/{source}/mean_at_1"].values())[-1] for source in SOURCES}


def accuracies(folder: Path, seed: int) -> dict[str, Accuracy]:
    """Train the start, the teachers and all runs of a seed; return the accuracy after each."""
    write_data(folder / "data", seed)
    save_base(folder / "base", seed)
    train_files = f"data.train_files=[{folder}/data/train.parquet]"
    found = {"start": train("start", "quickstart_sft", "base", folder, seed, train_files)}
    for source in SOURCES:
        longer = [f"data.train_files=[{folder}/data/{source}.parquet]", "run.target_reward=null"]
        longer += [f"run.steps={SFT_STEPS}", f"run.eval_every={SFT_STEPS}"]
        found[f"teacher of {source} sums"] = train(source, "quickstart_sft", "start/policy", folder, seed, *longer)
    for number, (name, options) in enumerate(RUNS.items()):
        further = [train_files, f"run.steps={STEPS}", f"run.eval_every={STEPS}", "run.export=false"]
        further += [option.replace("FOLDER", str(folder)) for option in options]
        found[name] = train(f"run_{number}", "quickstart_grpo", "start/policy", folder, seed, *further)
    return found


def show(of_seeds: Mapping[int, Mapping[str, Accuracy]]) -> None:
    """Print the accuracy of even and of odd sums for each run and seed, and the means."""
    print(f"held-out accuracy ({NUM_TEST} sums, greedy): even / odd first number")
    print(f"{'':36}" + "".join(f"{f'seed {seed}':>16}" for seed in of_seeds) + f"{'mean':>16}")
    for name in next(iter(of_seeds.values())):
        rows = [of[name] for of in of_seeds.values()]
        means = {source: fmean(row[source] for row in rows) for source in SOURCES}
        print(f"{name:36}" + "".join(f"{'{even:.3f} / {odd:.3f}'.format(**row):>16}" for row in [*rows, means]))


def main() -> int:
    """Train, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, help="keep the runs here")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        of_seeds = {seed: accuracies(folder / str(seed), seed) for seed in arguments.seeds}
    show(of_seeds)
    gains = [of[BOTH][source] - of["start"][source] for of in of_seeds.values() for source in SOURCES]
    return 0 if min(gains) >= LEAST_GAIN else 1


if __name__ == "__main__":
    raise SystemExit(main())
