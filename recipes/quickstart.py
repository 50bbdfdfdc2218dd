"""Quickstart: data, a tiny model, SFT, GRPO and a table of the results, in minutes on a laptop.

`python -m rl_plugins.recipes.quickstart [seed=0] [folder=FOLDER] [key=value ...]`. Keys are options of the GRPO stage.
"""

import os
import sys
import time
from datetime import datetime
from pathlib import Path

from rl_plugins.config.recipe import parse_config
from rl_plugins.errors import ConfigError
from rl_plugins.launch.command_line import exit_on_user_error, run_recipe
from rl_plugins.launch.compose import compose_config, override
from rl_plugins.launch.quickstart import NUM_DEV, NUM_TEST, NUM_TRAIN, print_outcome, save_base, write_sums


def main() -> None:
    """Run the quickstart; exit with status 1 if GRPO did not learn."""
    start = time.perf_counter()
    # Waiting threads do not spin, and DeepSpeed does not print the choice of a device.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    options = dict(argument.partition("=")[::2] for argument in sys.argv[1:])
    seed = options.pop("seed", "0")
    if not seed.isdigit():
        raise ConfigError(f"seed={seed} must be a whole number")
    folder = Path(options.pop("folder", f"outputs/quickstart-{datetime.now():%Y%m%d-%H%M%S}"))
    if folder.exists():
        raise ConfigError(f"folder={folder} exists: choose another folder, or leave the option out")
    data = folder / "data"
    common = [
        override("run.output_dir", folder), override("data.train_files", [data / "train.parquet"]), f"run.seed={seed}",
        override("tracking.uri", f"sqlite:///{folder.absolute()}/mlflow.db"), "tracking.experiment=quickstart",
    ]  # fmt: skip
    # Both configurations are checked before the first stage spends any time.
    sft_options = [override("model.path", folder / "base"), override("data.val_files", [data / "dev.parquet"])]
    grpo_options = [override("model.path", folder / "sft/policy"), override("data.val_files", [data / "test.parquet"])]
    grpo_options += [f"{key}={value}" for key, value in options.items()]
    sft_config = parse_config(compose_config("quickstart_sft", [*common, *sft_options]))
    grpo_config = parse_config(compose_config("quickstart_grpo", [*common, *grpo_options]))
    rows = f"{NUM_TRAIN} rows to train on, {NUM_DEV} to decide the end of SFT, {NUM_TEST} to test"
    print(f"[1/4] sums of numbers below 50: {rows} -> {data}", flush=True)
    write_sums(data, int(seed))
    print(f"[2/4] a small Qwen2 model and its tokenizer -> {folder}/base", flush=True)
    save_base(folder / "base", int(seed))
    print("[3/4] SFT in this process", flush=True)
    sft = run_recipe(sft_config, "quickstart_sft")
    print("[4/4] GRPO: two ZeRO-3 workers and a vLLM engine, which start in about a minute", flush=True)
    # `parse_config` makes the paths of existing folders absolute, and SFT has just created this folder.
    grpo_config.model.path = str((folder / "sft" / "policy").absolute())
    grpo = run_recipe(grpo_config, "quickstart_grpo")
    learned = print_outcome(sft, grpo, f"{NUM_DEV} dev", f"{NUM_TEST} test", time.perf_counter() - start)
    sys.exit(0 if learned else 1)


if __name__ == "__main__":
    exit_on_user_error(main)
