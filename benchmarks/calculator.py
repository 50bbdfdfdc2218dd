"""A tiny model learns to call a calculator: held-out score before and after GRPO, with the tool and without.

`python -m benchmarks.calculator [--seeds 0] [--launcher local]` makes products of numbers, the quickstart's model with
a vocabulary for tools, an SFT start and a GRPO run. Without the tool, both stages have the answers alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from rl_plugins.config.recipe import parse_config
from rl_plugins.data.prepare.calculator import answer_rows, call_rows, product_rows
from rl_plugins.data.prepare.files import write_splits
from rl_plugins.launch.command_line import compose_config, run_recipe
from rl_plugins.launch.terminal import quiet_libraries
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.run_folder import read_metrics

SIZES = {"num_train": 2048, "num_dev": 64, "num_test": 256}
WITHOUT_TOOL = ["environment=reply", "environment.tools=[]"]
LOCAL = ["launcher=local", "rollout.engine=transformers"]


def main() -> None:
    """Train, and print a line for each seed and each kind of policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--launcher", choices=("ray", "local"), default="ray")
    arguments = parser.parse_args()
    quiet_libraries()
    lines = []
    for seed in arguments.seeds:
        for with_tool in (True, False):
            with tempfile.TemporaryDirectory() as name:
                further = LOCAL if arguments.launcher == "local" else []
                lines.append(f"seed {seed}, {measure(Path(name), seed, with_tool=with_tool, further=further)}")
    print("\n".join(lines))


def measure(folder: Path, seed: int, *, with_tool: bool, further: list[str]) -> str:
    """Train in a folder, and return the scores and the time."""
    start = time.perf_counter()
    splits = product_rows(**SIZES, seed=seed)
    taught = call_rows if with_tool else answer_rows
    write_splits({**splits, "sft": taught(splits["train"])}, folder / "data")
    save_tiny_policy(folder / "base", seed=seed, tools=True)
    group = [] if with_tool else WITHOUT_TOOL
    common = [f"run.output_dir={folder}", f"run.seed={seed}", "tracking.enabled=false", *group]
    data = folder / "data"
    files = {"sft": ("sft", "dev"), "grpo": ("train", "test")}
    for stage, model in (("sft", "base"), ("grpo", "calculator_sft/policy")):
        train, held_out = files[stage]
        options = [
            f"model.path={folder / model}", f"data.train_files=[{data}/{train}.parquet]",
            f"data.val_files=[{data}/{held_out}.parquet]", *common, *(further if stage == "grpo" else []),
        ]  # fmt: skip
        run_recipe(parse_config(compose_config(f"calculator_{stage}", options)))
    series = read_metrics(folder / "calculator_grpo" / "metrics.jsonl")
    scores = list(series["val/reward"].values())
    kind = "with the tool" if with_tool else "without the tool"
    steps = sorted(series["time/step"].values())
    return (
        f"{kind}: held-out score {scores[0]:.3f} -> {scores[-1]:.3f} in {len(steps)} steps of "
        f"{steps[len(steps) // 2]:.2f} s, {time.perf_counter() - start:.0f} s in all"
    )


if __name__ == "__main__":
    main()
