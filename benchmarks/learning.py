"""Learning curves: held-out accuracy of several algorithms by the number of samples, on several seeds, with a picture.

`python -m benchmarks.learning [--seeds 0 1 2] [--only grpo ppo] [--picture docs/images/learning.png]` uses the data,
the tiny model, the SFT start and the settings of the quickstart. Every algorithm has the same number of samples. By
default, the algorithms are those of the picture in the documentation.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import mean

from benchmarks.shared_workers import train_in_turn
from rl_plugins.config.recipe import RecipeConfig, parse_config
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.launch.quickstart import NUM_TEST, save_base, write_sums
from rl_plugins.run_folder import read_metrics

STEPS, SAMPLES_PER_STEP = 75, 512
BUDGET = STEPS * SAMPLES_PER_STEP
# Changed options of the quickstart's GRPO.
ALGORITHMS: dict[str, list[str]] = {
    "grpo": [],
    "ppo": ["critic.optimizer.lr=1e-3", "critic.optimizer.betas=[0.9,0.95]", "critic.warmup_steps=5"],
    "rloo": [],
    "reinforce_plus_plus": [],
    # Settings for the response length: the longest answer has three tokens, including the end token.
    "dapo": ["algorithm.shaping.overlong.factor=0.1", "run.steps=50"],
    "online_dpo": ["stage=online_preference_optimization", "+loss.options.beta=0.1"],
    "vespo": [],
    # The best sample of a prompt may be wrong.
    "raft": ["algorithm.advantage_options.above=0.5"],
}
IN_PICTURE = ("grpo", "ppo", "rloo", "reinforce_plus_plus", "dapo", "online_dpo")

Curve = dict[int, float]


def start(folder: Path, seed: int) -> Path:
    """Make data, tiny model and SFT of the quickstart, and return the folder of the policy."""
    write_sums(folder / "data", seed)
    save_base(folder / "base", seed)
    overrides = [
        f"run.output_dir={folder}", f"run.seed={seed}", f"data.train_files=[{folder}/data/train.parquet]",
        f"model.path={folder}/base", f"data.val_files=[{folder}/data/dev.parquet]", "tracking.enabled=false",
    ]  # fmt: skip
    run_recipe(parse_config(compose_config("quickstart_sft", overrides)))
    return folder / "sft" / "policy"


def config_of(name: str, folder: Path, seed: int, overrides: list[str]) -> RecipeConfig:
    """Return the configuration of a run of an algorithm from `folder/sft/policy`."""
    group = [] if name == "online_dpo" else [f"algorithm={name}"]
    options = [
        *group, f"run.name={name}", f"run.output_dir={folder}", f"run.seed={seed}", f"run.steps={STEPS}",
        "run.eval_every=15", "run.checkpoint_every=100000", "run.export=false", "tracking.enabled=false",
        f"model.path={folder}/sft/policy", f"data.train_files=[{folder}/data/train.parquet]",
        f"data.val_files=[{folder}/data/test.parquet]", "placement.device=cpu", *overrides,
    ]  # fmt: skip
    return parse_config(compose_config("quickstart_grpo", options))


def curve(run: Path) -> Curve:
    """Return held-out accuracy by the number of samples, up to the budget."""
    series = read_metrics(run / "metrics.jsonl")
    batches = series.get("train/generation_batches", {})
    drawn, samples = {0: 0}, 0
    for step in series["train/reward"]:
        samples += SAMPLES_PER_STEP * int(batches.get(step, 1))
        drawn[step] = samples
    return {drawn[step]: value for step, value in series["val/reward"].items() if drawn[step] <= BUDGET}


def show(curves: Mapping[str, Mapping[int, Curve]]) -> None:
    """Print a table of the accuracy before and after training for each seed, and of the mean gain."""
    seeds = sorted(next(iter(curves.values())))
    print(f"held-out accuracy ({NUM_TEST} sums, greedy), before -> after at most {BUDGET} samples")
    print(f"{'':22}" + "".join(f"{f'seed {seed}':>18}" for seed in seeds) + f"{'mean gain':>12}")
    for name, of_seeds in curves.items():
        ends = [list(of_seeds[seed].values()) for seed in seeds]
        cells = "".join(f"{f'{values[0]:.3f} -> {values[-1]:.3f}':>18}" for values in ends)
        print(f"{name:22}{cells}{mean(values[-1] - values[0] for values in ends):12.3f}")


def plot(curves: Mapping[str, Mapping[int, Curve]], path: Path) -> None:
    """Draw the mean over the seeds for each algorithm, and a band from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for position, (name, of_seeds) in enumerate(curves.items()):
        points = sorted(set.intersection(*(set(one) for one in of_seeds.values())))
        # If seeds have different numbers of samples, each seed has its own line.
        if len(points) > 2:
            columns = [[one[point] for one in of_seeds.values()] for point in points]
            axes.plot(
                points, [mean(column) for column in columns], f"C{position}", marker="o", markersize=3, label=name
            )
            axes.fill_between(
                points, list(map(min, columns)), list(map(max, columns)), color=f"C{position}", alpha=0.12
            )
        else:
            for number, one in enumerate(of_seeds.values()):
                label = name if number == 0 else None
                axes.plot(list(one), list(one.values()), f"C{position}", alpha=0.6, linewidth=1, label=label)
    axes.set(xlabel="samples drawn", ylabel="held-out accuracy", title=f"{len(of_seeds)} seeds: mean, lowest, highest")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Train, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=IN_PICTURE)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the runs here, and go on from those that are there")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        for seed in arguments.seeds:
            if not (folder / str(seed) / "sft" / "policy").is_dir():
                start(folder / str(seed), seed)
        runs = [(name, seed) for seed in arguments.seeds for name in arguments.only]
        missing = [
            config_of(name, folder / str(seed), seed, ALGORITHMS[name])
            for name, seed in runs
            if not (folder / str(seed) / name / "done").is_file()
        ]
        if missing:
            train_in_turn(missing, folder / "ray")
        curves = {name: {seed: curve(folder / str(seed) / name) for seed in arguments.seeds} for name in arguments.only}
    show(curves)
    if arguments.picture:
        plot(curves, arguments.picture)
        print(f"picture: {arguments.picture}")


if __name__ == "__main__":
    main()
