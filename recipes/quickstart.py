"""The whole way on one laptop, in minutes: data, a tiny model, SFT, GRPO, and a table of what came of it.

`python -m rl_plugins.recipes.quickstart [seed=0] [folder=outputs/quickstart-...] [key=value ...]`; further overrides go
to the GRPO stage.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from pathlib import Path

from rl_plugins.errors import ConfigError
from rl_plugins.launch.command_line import compose_config, exit_on_config_error, run_recipe
from rl_plugins.launch.config import parse_config
from rl_plugins.run_folder import RunFolder

NUM_TRAIN, NUM_DEV, NUM_TEST = 1732, 256, 512
"""SFT stops by the dev rows, so that nothing is chosen by the test rows."""
MIN_GAIN = 0.15
"""What GRPO must add to the held-out accuracy for the run to count as learned."""


def main() -> None:
    """Run the quickstart; exits with status 1 if GRPO did not learn."""
    start = time.perf_counter()
    # A second OpenMP thread that spins costs more than it gives as soon as anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # DeepSpeed would say which device it takes, as soon as transformers saves a model.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    seed = options.pop("seed", "0")
    if not seed.isdigit():
        raise ConfigError(f"seed={seed}: must be a whole number")
    folder = Path(options.pop("folder", f"outputs/quickstart-{datetime.now():%Y%m%d-%H%M%S}"))
    if folder.exists():
        raise ConfigError(f"folder={folder} exists: choose another one, or leave it out")
    overrides = [f"{key}={value}" for key, value in options.items()]
    sft, grpo = run_stages(folder, int(seed), overrides)
    learned = report(folder, sft, grpo, time.perf_counter() - start)
    sys.exit(0 if learned else 1)


def run_stages(folder: Path, seed: int, overrides: list[str]) -> tuple[RunFolder, RunFolder]:
    """Data, tiny model, SFT, GRPO; returns the folders of the two runs."""
    from rl_plugins.data.prepare.addition import addition_rows
    from rl_plugins.data.prepare.writing import write_splits

    common = [
        f"run.output_dir={folder}",
        f"run.seed={seed}",
        f"data.train_files=[{folder}/data/train.parquet]",
        f"tracking.uri=sqlite:///{folder.absolute()}/mlflow.db",
        "tracking.experiment=quickstart",
    ]
    # Both configurations are checked before the first stage spends any time.
    sft_options = [f"model.path={folder}/base", f"data.val_files=[{folder}/data/dev.parquet]"]
    grpo_options = [f"model.path={folder}/sft/policy", f"data.val_files=[{folder}/data/test.parquet]", *overrides]
    sft_config = parse_config(compose_config("quickstart_sft", [*common, *sft_options]))
    grpo_config = parse_config(compose_config("quickstart_grpo", [*common, *grpo_options]))
    print(
        f"[1/4] sums of numbers below 50: {NUM_TRAIN} to train on, held out: {NUM_DEV} to end SFT by, "
        f"{NUM_TEST} to test on -> {folder}/data",
        flush=True,
    )
    rows = addition_rows(below=50, num_train=NUM_TRAIN, num_dev=NUM_DEV, num_test=NUM_TEST, seed=seed)
    write_splits(rows, folder / "data")
    print(f"[2/4] a small Qwen2 model and its tokenizer -> {folder}/base", flush=True)
    from rl_plugins.launch.quiet import quiet_libraries
    from rl_plugins.models.tiny import save_tiny_policy

    quiet_libraries()
    save_tiny_policy(folder / "base", seed=seed)
    print("[3/4] SFT in this process", flush=True)
    sft = run_recipe(sft_config, "quickstart_sft")
    print("[4/4] GRPO: two ZeRO-3 workers and a vLLM engine; they need about a minute to start", flush=True)
    # The folders exist only now.
    grpo_config.model.path = str((folder / "sft" / "policy").absolute())
    grpo = run_recipe(grpo_config, "quickstart_grpo")
    return sft, grpo


def report(folder: Path, sft: RunFolder, grpo: RunFolder, seconds: float) -> bool:
    """Print the table; returns whether GRPO learned."""
    from rich.console import Console
    from rich.table import Table

    from rl_plugins.report.learning_curve import plot_learning_curve
    from rl_plugins.report.summary import summarize

    curve = folder / "learning_curve.png"
    plot_learning_curve([sft, grpo], curve)
    first, second = summarize(sft), summarize(grpo)
    console = Console()
    accuracy = Table(title="Held-out accuracy (greedy, exact match)")
    for column in ("stage", "rows", "before", "after", "samples/s", "s/step"):
        accuracy.add_column(column, justify="left" if column in ("stage", "rows") else "right")
    for stage, rows, of in (("SFT", f"{NUM_DEV} dev", first), ("GRPO", f"{NUM_TEST} test", second)):
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
        ("MLflow", f"mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db  (run {_mlflow_run(grpo)})"),
        ("log-prob gap", f"trainer against sampler at most {second.gap_max:.1e} nats"),
        ("whole run", f"{seconds:.0f} s"),
        (
            "try next",
            f"python -m rl_plugins.recipes.grpo --config-name quickstart_grpo run.name=more run.output_dir={folder} "
            f"model.path={os.path.relpath(grpo.export)} 'data.train_files=[{folder}/data/train.parquet]' "
            f"'data.val_files=[{folder}/data/test.parquet]'",
        ),
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


def _mlflow_run(run: RunFolder) -> str:
    return run.tracking_run.read_text().strip() if run.tracking_run.is_file() else "none"


if __name__ == "__main__":
    exit_on_config_error(main)
