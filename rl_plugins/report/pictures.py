"""Curves of a run as PNG files: for MLflow, and for the quickstart.

matplotlib draws both. The functions use `Figure` without pyplot, because pyplot is for the main thread only and the
callback draws in another thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_plugins.report.charts import Series, main_curves
from rl_plugins.run_folder import RunFolder, read_metrics
from rl_plugins.whole_file import write_whole

_COLUMNS = 3
_MAX_MARKERS = 49


def draw_curves(series: Series, path: Path) -> bool:
    """Draw the main charts of the report as one picture.

    Args:
        series: metrics of the run.
        path: PNG file to write.

    Returns:
        True if there was a chart to draw; otherwise no file is written.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    charts = main_curves(series)
    if not charts:
        return False
    rows = -(-len(charts) // _COLUMNS)
    figure = Figure(figsize=(4 * _COLUMNS, 2.6 * rows), layout="constrained")
    for position, (title, curves) in enumerate(charts.items(), start=1):
        axes = figure.add_subplot(rows, _COLUMNS, position)
        for name, points in curves.items():
            marker = "." if len(points) <= _MAX_MARKERS else None
            axes.plot(list(points), list(points.values()), marker=marker, label=name)
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend(fontsize="x-small")
    write_whole(path, lambda file: figure.savefig(file, dpi=100, format="png"))
    return True


def draw_learning_curve(folders: Sequence[RunFolder], path: Path) -> None:
    """Draw the validation reward, and the training reward in a pale colour, of successive runs.

    Args:
        folders: folders of the runs, in the order of training. The steps of a run start where the run before ended.
        path: PNG file to write.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    start = 0
    for position, folder in enumerate(folders):
        series, colour = read_metrics(folder.metrics), f"C{position}"
        train, validation = series.get("train/reward", {}), series.get("val/reward", {})
        if train:
            axes.plot([start + step for step in train], list(train.values()), colour, alpha=0.25, linewidth=1)
        label = f"{folder.path.name}: greedy, held out"
        axes.plot([start + step for step in validation], list(validation.values()), colour, marker="o", label=label)
        end = start + max([*train, *validation, *series.get("train/loss", {}), 0])
        if position + 1 < len(folders):
            axes.axvline(end, color="grey", linewidth=0.8, linestyle=":")
        start = end
    axes.set(xlabel="step", ylabel="reward", ylim=(-0.02, 1.02), title="Learning curve (pale: training samples)")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    write_whole(path, lambda file: figure.savefig(file, dpi=120, format="png"))
