"""The learning curve of one run, or of several in a row, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_plugins.run_folder import RunFolder, read_metrics


def plot_learning_curve(folders: Sequence[RunFolder], path: Path) -> None:
    """Validation reward (and training reward, pale) over the steps of one run or of several in a row."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    start = 0
    for position, folder in enumerate(folders):
        series, colour = read_metrics(folder.metrics), f"C{position}"
        train, validation = series.get("train/reward", {}), series.get("val/reward", {})
        if train:
            axes.plot([start + step for step in train], list(train.values()), colour, alpha=0.25, linewidth=1)
        label = f"{folder.path.name}: greedy, held out"
        axes.plot([start + step for step in validation], list(validation.values()), colour, marker="o", label=label)
        last = start + max([*train, *validation, *series.get("train/loss", {}), 0])
        if position + 1 < len(folders):
            axes.axvline(last, color="grey", linewidth=0.8, linestyle=":")
        start = last
    axes.set(xlabel="step", ylabel="reward", ylim=(-0.02, 1.02), title="Learning curve (pale: training samples)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
