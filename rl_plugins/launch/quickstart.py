"""Parts of the quickstart: sums as data, a small model with random weights, and the printed results."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_plugins.launch.compose import override
from rl_plugins.report.pictures import draw_learning_curve
from rl_plugins.report.summary import summarize
from rl_plugins.run_folder import RunFolder

NUM_TRAIN, NUM_DEV, NUM_TEST = 1732, 256, 512
"""Rows of each file. SFT stops by the dev rows, so that no choice depends on the test rows."""
MIN_GAIN = 0.15
"""Gain of held-out accuracy that GRPO must reach to count as learned."""


def write_sums(folder: Path, seed: int) -> None:
    """Write parquet files `train`, `dev` and `test` with sums of numbers below 50."""
    from rl_plugins.data.prepare.files import write_splits
    from rl_plugins.data.prepare.tasks import addition_rows

    rows = addition_rows(below=50, num_train=NUM_TRAIN, num_dev=NUM_DEV, num_test=NUM_TEST, seed=seed)
    write_splits(rows, folder)


def save_base(folder: Path, seed: int) -> None:
    """Save a small model with random weights, and its tokenizer."""
    from rl_plugins.launch.terminal import quiet_libraries
    from rl_plugins.models.tiny import save_tiny_policy

    quiet_libraries()
    save_tiny_policy(folder, seed=seed)


def print_outcome(sft: RunFolder, grpo: RunFolder, sft_rows: str, grpo_rows: str, seconds: float) -> bool:
    """Print accuracy, seconds by phase and the paths of all results, and draw the learning curve of both runs.

    Args:
        sft: folder of the SFT run.
        grpo: folder of the GRPO run. The picture of the learning curve is written to its parent folder.
        sft_rows: description of the rows on which SFT was validated.
        grpo_rows: description of the rows on which GRPO was validated.
        seconds: duration of the whole quickstart.

    Returns:
        True if GRPO learned.
    """
    folder = grpo.path.parent
    curve = folder / "learning_curve.png"
    draw_learning_curve([sft, grpo], curve)
    sft_summary, grpo_summary = summarize(sft), summarize(grpo)
    console = Console()
    accuracy = Table(title="Held-out accuracy (greedy, exact match)")
    for column in ("stage", "rows", "before", "after", "samples/s", "s/step"):
        accuracy.add_column(column, justify="left" if column in ("stage", "rows") else "right")
    for stage, rows, summary in (("SFT", sft_rows, sft_summary), ("GRPO", grpo_rows, grpo_summary)):
        rate = f"{summary.samples_per_s:.0f}" if summary.samples_per_s else ""
        figures = (f"{summary.before:.3f}", f"{summary.after:.3f}", rate, f"{summary.step_s:.2f}")
        accuracy.add_row(stage, rows, *figures)
    console.print(accuracy)
    phases = Table(title="Seconds of a GRPO step, by phase (medians)")
    for phase in grpo_summary.phases_s:
        phases.add_column(phase, justify="right")
    phases.add_row(*(f"{value:.3f}" for value in grpo_summary.phases_s.values()))
    console.print(phases)
    store = shlex.quote(f"sqlite:///{folder}/mlflow.db")
    run_id = grpo.tracking_run.read_text().strip() if grpo.tracking_run.is_file() else "none"
    for name, value in (
        ("checkpoint", grpo.latest_checkpoint()),
        ("Hugging Face", grpo.export),
        ("learning curve", curve),
        ("report", grpo.report),
        ("metrics", grpo.metrics),
        ("MLflow", f"mlflow ui --backend-store-uri {store}  (run {run_id})"),
        ("log-prob gap", f"at most {grpo_summary.gap_max:.1e} nats between trainer and sampler"),
        ("whole run", f"{seconds:.0f} s"),
        ("try next", f"python -m rl_plugins.recipes.grpo --config-name quickstart_grpo {_next_options(grpo)}"),
    ):
        print(f"{name:<15}{os.path.relpath(value) if isinstance(value, Path) else value}")
    gain = grpo_summary.after - grpo_summary.before
    if gain < MIN_GAIN:
        console.print(
            f"GRPO DID NOT LEARN: held-out accuracy changed by {gain:+.3f}, less than the expected +{MIN_GAIN}. "
            f"See the learning curve and the samples in {grpo.samples}.",
            style="bold red",
            markup=False,
        )
    return gain >= MIN_GAIN


def _next_options(grpo: RunFolder) -> str:
    """Return the options, quoted for a shell, of a run that continues from the policy."""
    folder = grpo.path.parent
    options = (
        "run.name=more",
        override("run.output_dir", folder),
        override("model.path", os.path.relpath(grpo.export)),
        override("data.train_files", [f"{folder}/data/train.parquet"]),
        override("data.val_files", [f"{folder}/data/test.parquet"]),
    )
    return shlex.join(options)
