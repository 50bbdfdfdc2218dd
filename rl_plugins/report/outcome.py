"""What came of SFT and GRPO on one policy, in a terminal: accuracy, seconds by phase, and where everything is."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_plugins.override import override
from rl_plugins.report.learning_curve import plot_learning_curve
from rl_plugins.report.summary import summarize
from rl_plugins.run_folder import RunFolder

MIN_GAIN = 0.15
"""What GRPO must add to the held-out accuracy for the run to count as learned."""


def print_outcome(sft: RunFolder, grpo: RunFolder, sft_rows: str, grpo_rows: str, seconds: float) -> bool:
    """Print tables and where things are; returns whether GRPO learned.

    Args:
        sft: the first run.
        grpo: the second; the folder above them gets a picture of both.
        sft_rows: what the first was validated on, in words.
        grpo_rows: what the second was validated on.
        seconds: that all of it took.
    """
    folder = grpo.path.parent
    curve = folder / "learning_curve.png"
    plot_learning_curve([sft, grpo], curve)
    first, second = summarize(sft), summarize(grpo)
    console = Console()
    accuracy = Table(title="RemoteSamples-out accuracy (greedy, exact match)")
    for column in ("stage", "rows", "before", "after", "samples/s", "s/step"):
        accuracy.add_column(column, justify="left" if column in ("stage", "rows") else "right")
    for stage, rows, of in (("SFT", sft_rows, first), ("GRPO", grpo_rows, second)):
        rate = f"{of.samples_per_s:.0f}" if of.samples_per_s else ""
        accuracy.add_row(stage, rows, f"{of.before:.3f}", f"{of.after:.3f}", rate, f"{of.step_s:.2f}")
    console.print(accuracy)
    phases = Table(title="Seconds of a GRPO step, by phase (medians)")
    for phase in second.phases_s:
        phases.add_column(phase, justify="right")
    phases.add_row(*(f"{value:.3f}" for value in second.phases_s.values()))
    console.print(phases)
    for name, value in (
        ("checkpoint", grpo.latest_checkpoint()),
        ("Hugging Face", grpo.export),
        ("learning curve", curve),
        ("report", grpo.report),
        ("metrics", grpo.metrics),
        (
            "MLflow",
            f"mlflow ui --backend-store-uri {shlex.quote(f'sqlite:///{folder}/mlflow.db')}  (run {_mlflow_run(grpo)})",
        ),
        ("log-prob gap", f"trainer against sampler at most {second.gap_max:.1e} nats"),
        ("whole run", f"{seconds:.0f} s"),
        ("try next", f"python -m rl_plugins.recipes.grpo --config-name quickstart_grpo {_next_options(grpo)}"),
    ):
        print(f"{name:<15}{os.path.relpath(value) if isinstance(value, Path) else value}")
    gain = second.after - second.before
    if gain < MIN_GAIN:
        console.print(
            f"GRPO DID NOT LEARN: held-out accuracy changed by {gain:+.3f}, expected at least +{MIN_GAIN}. "
            f"Look at the learning curve and at {grpo.samples}.",
            style="bold red",
            markup=False,
        )
    return gain >= MIN_GAIN


def _next_options(grpo: RunFolder) -> str:
    """Of a run that goes on from the policy, to be copied into a shell."""
    folder = grpo.path.parent
    options = (
        "run.name=more",
        override("run.output_dir", folder),
        override("model.path", os.path.relpath(grpo.export)),
        override("data.train_files", [f"{folder}/data/train.parquet"]),
        override("data.val_files", [f"{folder}/data/test.parquet"]),
    )
    return shlex.join(options)


def _mlflow_run(run: RunFolder) -> str:
    return run.tracking_run.read_text().strip() if run.tracking_run.is_file() else "none"
