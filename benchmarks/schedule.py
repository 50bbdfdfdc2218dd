"""Gain of sampling ahead of training, and cost of stragglers and of a lost engine, compared with synchronous runs.

`python -m benchmarks.schedule [--parts speed accuracy stragglers lost] [--seeds 0 1 2]` prints one table per part.

- speed: one worker and one engine with one core each, and about equal times of generation and training.
- accuracy: held-out accuracy of the quickstart's GRPO after equal numbers of samples.
- stragglers: one sample in 64 is ten times longer than the others.
- lost: one of two engines is killed in the middle of a run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import psutil

from benchmarks.learning import config_of, start
from benchmarks.policies import save_policy, save_prompts
from benchmarks.runs import TIMEOUT_S, MeasuredRun, run_grpo, started
from rl_plugins.config.recipe import parse_config
from rl_plugins.launch.command_line import run_recipe
from rl_plugins.launch.compose import compose_config
from rl_plugins.run_folder import metric_rows, read_metrics

AHEAD = "schedule.max_staleness=1"
SHORT, LONG = 4, 40
"""Tokens of a response."""


def speed(overrides: list[str]) -> None:
    """Print samples per second and idle shares."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(folder / "policy", hidden_size=256, num_layers=4, intermediate_size=704, vocab_size=8192)
        save_prompts(folder / "data")
        common = [
            "run.steps=20", "placement.num_workers=1", "strategy.zero_stage=1", "batch.prompts_per_step=4",
            "batch.samples_per_prompt=4", "sampling.max_tokens=96", "data.max_prompt_tokens=64",
            "batch.tokens_per_micro_batch=4096", "rollout.sleep=none", *overrides,
        ]  # fmt: skip
        runs = {
            "synchronous": run_grpo(folder, *common, name="synchronous"),
            "one step ahead": run_grpo(folder, *common, AHEAD, name="ahead"),
        }
    sync = runs["synchronous"]
    rollout, step = sync.median("time/rollout"), sync.median("time/step")
    print(f"\nspeed: synchronous steps sample for {rollout:.2f} s and train for {step - rollout:.2f} s")
    print(f"  {'':16}{'s/step':>9}{'samples/s':>11}{'trainer idle':>14}{'engine idle':>13}{'times':>8}")
    for name, run in runs.items():
        idle = f"{run.median('idle/trainer'):14.0%}{run.median('idle/engine'):13.0%}"
        times = run.median("samples_per_s") / sync.median("samples_per_s")
        print(f"  {name:16}{run.median('time/step'):9.2f}{run.median('samples_per_s'):11.1f}{idle}{times:8.2f}")


def accuracy(seeds: list[int]) -> None:
    """Print the held-out accuracy of both modes for each seed."""
    modes = {"synchronous": [], "one step ahead": [AHEAD]}
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    before = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            start(folder, seed)
            for position, (mode, options) in enumerate(modes.items()):
                config = config_of("grpo", folder, seed, [f"run.name=run{position}", *options])
                run_recipe(config)
                curve = read_metrics(folder / f"run{position}" / "metrics.jsonl")["val/reward"]
                found[mode].append(curve[max(curve)])
                if not position:
                    before.append(curve[0])
    print("\naccuracy: held-out, after as many samples")
    print(f"  {'':16}" + "".join(f"{f'seed {seed}':>9}" for seed in seeds) + f"{'mean':>9}")
    for mode, values in {"before": before, **found}.items():
        print(f"  {mode:16}" + "".join(f"{value:9.3f}" for value in values) + f"{mean(values):9.3f}")


def stragglers() -> None:
    """Print the median step time, compared with a run of short responses only."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_stragglers(folder)
        common = [
            "run.steps=40", "batch.prompts_per_step=64", "batch.samples_per_prompt=2",
            f"sampling.max_tokens={LONG + 1}", "data.max_prompt_tokens=24", "optimizer.lr=0",
            "reward.functions.default={_target_: benchmarks.schedule.length}",
        ]  # fmt: skip
        with_them = f"data.train_files=[{folder}/data/train.parquet]"
        runs = {
            "none, synchronous": run_grpo(folder, *common, f"data.train_files=[{folder}/data/short.parquet]", name="a"),
            "synchronous": run_grpo(folder, *common, with_them, name="b"),
            "late ones dropped": run_grpo(folder, *common, with_them, "schedule.ahead=0.125", name="c"),
            "one step later": run_grpo(folder, *common, with_them, AHEAD, "schedule.ahead=0.125", name="d"),
        }
    base = runs["none, synchronous"].median("time/step")
    print(f"\nstragglers: one sample in 64 has {LONG} tokens, the others {SHORT}")
    print(f"  {'':20}{'s/step':>9}{'times':>8}{'mean length':>13}")
    for name, run in runs.items():
        step, length = run.median("time/step"), mean(run.values("train/response_length"))
        print(f"  {name:20}{step:9.3f}{step / base:8.2f}{length:13.1f}")


def length(solution_str: str) -> float:
    """Reward by the length of the response."""
    return len(solution_str) / LONG


def _save_stragglers(folder: Path) -> None:
    """Save a policy with learned response lengths, and prompts such as `short 17` and `long 3`: one of 64 is long."""
    from rl_plugins.data.prepare.files import write_splits
    from rl_plugins.models.tiny import save_tiny_policy

    def rows(prompts: list[str]) -> list[dict[str, object]]:
        return [
            {
                "data_source": "stragglers",
                "prompt": [{"role": "user", "content": prompt}],
                "ability": "none",
                "reward_model": {
                    "style": "rule",
                    "ground_truth": "a" * SHORT if "short" in prompt else ("abcdefghij" * LONG)[:LONG],
                },
                "extra_info": {"split": "train"},
            }
            for prompt in prompts
        ]

    shorts, longs = [f"short {number}" for number in range(64)], [f"long {number}" for number in range(64)]
    splits = {"sft": rows(shorts + longs), "short": rows(shorts), "train": rows([*shorts[:63], longs[0]])}
    write_splits(splits, folder / "data")
    save_tiny_policy(folder / "base")
    options = [
        f"run.output_dir={folder}", "run.steps=150", "run.eval_every=0", "tracking.enabled=false",
        "batch.prompts_per_step=64",
        f"model.path={folder}/base", f"data.train_files=[{folder}/data/sft.parquet]",
        f"sampling.max_tokens={LONG + 1}", "data.max_prompt_tokens=24", "run.name=sft",
    ]  # fmt: skip
    run_recipe(parse_config(compose_config("quickstart_sft", options)))
    (folder / "sft" / "policy").rename(folder / "policy")


def lost() -> None:
    """Print the delay of a run after the loss of an engine, in steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_policy(folder / "policy", hidden_size=256, num_layers=4, intermediate_size=704, vocab_size=8192)
        save_prompts(folder / "data")
        run = _run_and_kill(folder, at_step=6)
    steps, at = run.values("time/step"), run.values("rollout/engines_lost").index(1.0)
    engines = list(zip(steps, run.values("rollout/engines"), strict=True))[2:]
    usual, alone = median([step for step, count in engines if count == 2]), [s for s, count in engines if count == 1]
    more = sum(step / usual - 1 for step in alone)
    print(f"\nlost: an engine of two is killed in a run of {usual:.2f} s a step; it is back after {len(alone)} steps")
    print(f"  the step itself took {steps[at]:.2f} s; in all the run took {more:.2f} steps longer")


def _run_and_kill(folder: Path, at_step: int) -> MeasuredRun:
    options = [
        "run.name=lost", f"run.output_dir={folder}/outputs", f"model.path={folder}/policy",
        f"data.train_files=[{folder}/data/train.parquet]", "run.export=false", "run.eval_every=0",
        "run.checkpoint_every=1000", "tracking.enabled=false", "run.steps=30", "rollout.engines=2",
        "batch.prompts_per_step=32", "batch.samples_per_prompt=4", "sampling.max_tokens=48",
        "data.max_prompt_tokens=64", "batch.tokens_per_micro_batch=4096",
    ]  # fmt: skip
    metrics = folder / "outputs" / "lost" / "metrics.jsonl"

    def rows() -> list[dict[str, float]]:
        return [row for row in metric_rows(metrics) if "train/loss" in row]

    command = [sys.executable, "-m", "rl_plugins.recipes.grpo", *options]
    deadline = time.monotonic() + TIMEOUT_S
    with started(command) as process:
        while len(rows()) < at_step:
            if process.poll() is not None:
                raise RuntimeError(f"the recipe ended with status {process.returncode} before step {at_step}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the recipe has not reached step {at_step} after {TIMEOUT_S} s")
            time.sleep(0.1)
        for child in psutil.Process(process.pid).children(recursive=True):
            if "VLLMActor" in " ".join(child.cmdline()):
                child.kill()
                break
        if process.wait(TIMEOUT_S):
            raise RuntimeError(f"the recipe ended with status {process.returncode}")
    return MeasuredRun(rows())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("speed", "accuracy", "stragglers", "lost")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options of `speed`")
    arguments = parser.parse_args()
    if "speed" in arguments.parts:
        speed(arguments.set)
    if "accuracy" in arguments.parts:
        accuracy(arguments.seeds)
    if "stragglers" in arguments.parts:
        stragglers()
    if "lost" in arguments.parts:
        lost()


if __name__ == "__main__":
    main()
