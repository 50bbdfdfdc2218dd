"""Show a run in the terminal: curves, seconds of each phase, samples of the last validation, and paths of files.

During a run, the command shows all finished steps.

  rl-plugins show outputs/run
  rl-plugins show outputs/run --samples 10
  rl-plugins show outputs/run --metrics 'val/*' 'memory/*'
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from rl_plugins.commands.main import add_run_argument, existing_run, number
from rl_plugins.config.settings import NOT_NEGATIVE
from rl_plugins.errors import ConfigError
from rl_plugins.report.summary import read_samples, summarize
from rl_plugins.run_folder import RunFolder, count_damaged_lines, read_metrics
from rl_plugins.text_file import REMOVE, read_text

if TYPE_CHECKING:
    from rich.console import Console

MAIN = (
    "val/reward", "val/accuracy", "val/loss", "val/*_at_[0-9]", "val/*_at_[0-9][0-9]", "val/*_at_[0-9][0-9][0-9]",
    "train/reward", "train/accuracy",
    "train/loss", "train/kl", "train/entropy", "train/response_length", "train/truncated", "train/gradient_norm",
    "train/rollout_gap_max", "train/critic/loss", "tokens_per_s", "time/step",
)  # fmt: skip
"""Patterns of the metrics that are shown without --metrics."""

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 20
_SHOWN_CHARACTERS = 400


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_argument(parser)
    parser.add_argument("--metrics", nargs="+", default=MAIN, metavar="PATTERN", help="metrics, such as 'time/*'")
    parser.add_argument(
        "--samples",
        type=number(int, NOT_NEGATIVE),
        default=3,
        help="samples of the last validation (default: %(default)s)",
    )


def run(arguments: Namespace) -> int:
    """Show the run.

    Raises:
        ConfigError: the folder is not the folder of a run, the run has none of the metrics, or a file is damaged.
    """
    from rl_plugins.commands.terminal import Terminal

    folder = existing_run(arguments.run)
    series = read_metrics(folder.metrics)
    chosen = [name for pattern in arguments.metrics for name in series if fnmatch(name, pattern)]
    if not chosen:
        raise ConfigError(
            f"{folder.metrics} has no metric {' or '.join(arguments.metrics)}; it has {', '.join(series)}"
        )
    console = Terminal()
    _show_curves(console, {name: series[name] for name in chosen})
    _show_phases(console, folder)
    _show_samples(console, folder, arguments.samples)
    _show_paths(console, folder)
    if damaged := count_damaged_lines(folder.metrics):
        console.print(f"{'left out':<17}{damaged} damaged lines of {folder.metrics}")
    return 0


def sparkline(values: Sequence[float]) -> str:
    """Return a curve of at most `_WIDTH` characters. Each character shows the mean of an equal share of the values."""
    count = min(_WIDTH, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [fmean(values[start:stop]) for start, stop in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _show_curves(console: Console, series: Mapping[str, Mapping[int, float]]) -> None:
    from rich.table import Table

    last = max(step for points in series.values() for step in points)
    table = Table(show_edge=False)
    for column, justify in (
        ("metric", "left"),
        (f"to step {last}", "left"),
        ("last", "right"),
        ("lowest", "right"),
        ("highest", "right"),
    ):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for name, points in series.items():
        values = list(points.values())
        numbers = [f"{value:.3g}" for value in (values[-1], min(values), max(values))]
        table.add_row(name, sparkline(values), *numbers)
    console.print(table)


def _show_phases(console: Console, folder: RunFolder) -> None:
    """Print the median seconds of each phase of a step, and the share of the phase in the step."""
    seconds = summarize(folder).phases_s
    total = sum(seconds.values())
    if total:
        console.print("\nseconds of a step by phase (medians):")
        for phase, median in sorted(seconds.items(), key=lambda item: -item[1]):
            share = median / total
            console.print(f"  {phase:<22}{median:8.3f}  {share:4.0%} {'█' * round(share * _WIDTH)}")


def _show_samples(console: Console, folder: RunFolder, count: int) -> None:
    tables = [(file, rows) for file in folder.sample_files() if (rows := read_samples(file)) is not None]
    if not tables or count < 1:
        return
    file, rows = tables[-1]
    console.print(f"\n{min(count, len(rows))} of {len(rows)} samples in {file}:")
    for row in rows[:count]:
        score = f"failed ({row['failure']})" if row["failure"] else f"{row['score']:.4g}"
        console.print(f"  score {score}, ground truth {_shorten(row['ground_truth'])}")
        for key in ("prompt", "response"):
            console.print(f"    {key}: {_shorten(row[key])}")


def _shorten(text: object) -> str:
    line = " ".join(str(text).split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..."


def _show_paths(console: Console, folder: RunFolder) -> None:
    console.print()
    for name, path in folder.places().items():
        console.print(f"{name:<17}{path}")
    if folder.tracking_run.is_file():
        console.print(f"{'MLflow run':<17}{read_text(folder.tracking_run, REMOVE).strip()}")
    if times := folder.times_resumed():
        console.print(f"{'resumed':<17}{times} times")
