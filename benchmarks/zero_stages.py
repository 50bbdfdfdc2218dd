"""Trained tokens per second under ZeRO stages 1, 2 and 3: two CPU workers over gloo, 28 M parameters.

`python -m benchmarks.zero_stages [--precision bf16-true] [--steps 5] [--stages 1 2 3]` prints the median step of each
stage, the processor time of a step, the ratio of the rates of stages 3 and 2, and the share of parameters without
sharding in stage 3. On a machine with other work, compare the processor times. `--zero stage3_prefetch_bucket_size=0`
sets an option of DeepSpeed's `zero_optimization`. `--profile` prints the kinds of work in the last step of the first
worker. `--recompute` recomputes activations in the backward pass.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.policies import save_28m

WORKERS = 2
SEQUENCES, TOKENS = 16, 192  # in a step of one worker
MICRO_BATCH = 8
WARM_UP = 2
TIMEOUT_S = 1200.0


KINDS = {
    "matrix products": (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "matmul",
        "mkldnn",
        "scaled_dot_product",
        "attention",
    ),
    "communication": ("gloo:", "c10d::", "record_param_comms", "collective:"),
    "optimizer": ("adam", "_foreach"),
}


def kind_of(operation: str) -> str:
    """Return the kind of an operation of the profiler."""
    return next((kind for kind, parts in KINDS.items() if any(part in operation.lower() for part in parts)), "the rest")


def label_collectives() -> None:
    """Add a label to DeepSpeed's collectives, because the profiler does not see the wait in collectives."""
    from deepspeed.comm.torch import TorchBackend
    from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, AllGatherHandle
    from torch.profiler import record_function

    def labelled(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with record_function(f"collective: {inner.__name__}"):
                return inner(*arguments, **keywords)

        return call

    for owner, names in (
        (TorchBackend, ("all_reduce", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")),
        (AllGatherHandle, ("wait",)),
        (AllGatherCoalescedHandle, ("wait",)),
    ):
        for name in names:
            setattr(owner, name, labelled(getattr(owner, name)))


class Sequences:
    """Random prompts and responses for the stage of supervised fine-tuning."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, list[list[int]]]:
        if step >= self.steps:
            raise IndexError(step)
        rng = random.Random(step)
        prompts, responses = (
            [[rng.randrange(256) for _ in range(length)] for _ in range(SEQUENCES)] for length in (64, TOKENS - 64)
        )
        return {"prompt_ids": prompts, "response_ids": responses}


def work(
    policy: Path,
    output: Path,
    stage: int,
    precision: str,
    steps: int,
    options: dict[str, Any],
    *,
    profiled: bool,
    recompute: bool,
) -> None:
    """Train with one ZeRO stage in a worker. The first worker writes the measurements."""
    import torch
    from lightning.pytorch import Callback, Trainer
    from torch.utils.data import DataLoader

    from rl_plugins.config.sampling import SamplingConfig
    from rl_plugins.data.tokenization import load_tokenizer
    from rl_plugins.rewards.scorers import exact_match
    from rl_plugins.stages.sft import SFT
    from rl_plugins.strategies.contract import POLICY
    from rl_plugins.strategies.zero import ZeroStrategy

    torch.set_num_threads(1)
    if profiled:
        label_collectives()
    measured: dict[str, Any] = {"seconds": [], "processor_seconds": []}

    class Watch(Callback):
        profiler: Any = None

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            if profiled and number == WARM_UP + steps - 1:
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                self.profiler.start()
            self.start = time.perf_counter(), time.process_time()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            measured["seconds"].append(time.perf_counter() - self.start[0])
            measured["processor_seconds"].append(time.process_time() - self.start[1])
            if self.profiler is not None:
                self.profiler.stop()
                spent: dict[str, float] = {}
                for event in self.profiler.key_averages():
                    spent[event.key] = spent.get(event.key, 0.0) + event.self_cpu_time_total / 1e6
                measured["profile"] = spent
            parameters = list(trainer.strategy.model_engine(POLICY).module.parameters())
            whole = sum(getattr(p, "ds_numel", p.numel()) for p in parameters if getattr(p, "ds_persist", stage < 3))
            measured["whole"] = whole / sum(getattr(p, "ds_numel", p.numel()) for p in parameters)

    strategy = ZeroStrategy(stage=stage, timeout_s=TIMEOUT_S)
    assert strategy.config is not None
    strategy.config["zero_optimization"].update(options)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=WORKERS, precision=cast(Any, precision), callbacks=[Watch()],
        max_steps=-1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    model = SFT(
        str(policy),
        tokenizer=load_tokenizer(str(policy)),
        scorer=exact_match,
        eval_sampling=SamplingConfig(max_tokens=1),
        tokens_per_micro_batch=MICRO_BATCH * TOKENS,
        gradient_checkpointing=recompute,
    )
    trainer.fit(model, DataLoader(cast(Any, Sequences(WARM_UP + steps)), batch_size=None))
    if trainer.is_global_zero:
        output.write_text(json.dumps(measured))


def train(policy: Path, stage: int, *options: str) -> dict[str, Any]:
    """Return the measurements of the first worker of a run: `seconds` of each step after the warm-up, and more.

    Args:
        policy: folder of the model.
        stage: stage of ZeRO.
        *options: options of this program.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORKERS}",
            "-m", "benchmarks.zero_stages", "--worker", str(policy), str(output), str(stage), *options,
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        measured: dict[str, Any] = json.loads(output.read_text())
    return {**measured, "seconds": measured["seconds"][WARM_UP:]}


def main() -> None:
    """Run each stage in turn, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="bf16-true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--zero", nargs="*", default=[], metavar="OPTION=VALUE", help="of `zero_optimization`")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--worker", nargs=3, metavar=("POLICY", "OUTPUT", "STAGE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        policy, output, stage = options.worker
        zero = {name: json.loads(value) for name, value in (option.split("=") for option in options.zero)}
        work(
            Path(policy), Path(output), int(stage), options.precision, options.steps, zero,
            profiled=options.profile, recompute=options.recompute,
        )  # fmt: skip
        return
    rates: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = save_28m(folder / "policy")
        tokens = WORKERS * SEQUENCES * TOKENS
        print(f"{parameters / 1e6:.1f} M parameters, {options.precision}, {WORKERS} workers, {tokens} tokens a step")
        for stage in options.stages:
            measured = train(
                folder / "policy", stage, "--precision", options.precision, "--steps", str(options.steps),
                "--zero", *options.zero,
                *(["--profile"] if options.profile else []), *(["--recompute"] if options.recompute else []),
            )  # fmt: skip
            seconds = measured["seconds"]
            rates[stage] = tokens / median(seconds)
            print(
                f"ZeRO-{stage}: {rates[stage]:6.0f} tokens/s (median of {len(seconds)}; {min(seconds):.2f} to "
                f"{max(seconds):.2f} s a step), {median(measured['processor_seconds'][WARM_UP:]):.2f} s of a processor "
                f"a step and worker, {measured['whole']:.0%} of the parameters whole",
                flush=True,
            )
            if options.profile:
                print_profile(measured["profile"], measured["seconds"][-1])
    if {2, 3} <= rates.keys():
        print(f"ZeRO-3 reaches {rates[3] / rates[2]:.0%} of ZeRO-2")


def print_profile(spent: dict[str, float], step: float) -> None:
    """Print the share of a step of each kind of operation, and the largest other operations."""
    shares = dict.fromkeys([*KINDS, "the rest"], 0.0)
    for operation, seconds in spent.items():
        shares[kind_of(operation)] += seconds / step
    shares["Python, and waiting"] = max(0.0, 1 - sum(shares.values()))
    print("  " + ", ".join(f"{kind} {share:.1%}" for kind, share in shares.items()))
    rest = sorted((-seconds, name) for name, seconds in spent.items() if kind_of(name) == "the rest")
    print("  of the rest: " + ", ".join(f"{name} {-seconds / step:.1%}" for seconds, name in rest[:8]))


if __name__ == "__main__":
    main()
