"""Measure the rates of a machine for `rl-plugins plan --device cpu`, and write the rates to a file.

`python -m benchmarks.calibrate [--output FILE] [--kept FOLDER]` runs the GRPO recipe on two sizes of a model, in a few
minutes. The tiny model gives the memory of processes almost without a model, and the time of steps almost without
arithmetic. The model of 28 M parameters gives the rates of training and sampling in float32 and bfloat16. The settings
for which plans are made (several engines, other models and lengths, other ZeRO stages of the larger model) are not
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.plan_work import WORKERS, prepare_tiny, work_of
from benchmarks.policies import save_28m, save_prompts
from benchmarks.runs import MeasuredRun, run_grpo
from rl_plugins.planning.devices import CPU_FILE, Device
from rl_plugins.planning.memory import engine_memory, prompt_tokens_of_sample, total, trainer_memory
from rl_plugins.planning.step_time import training_flops
from rl_plugins.planning.workload import DTYPE_BYTES, Plan, Workload, micro_batch_sizes

PLAN = Plan(WORKERS, 1, zero_stage=1, offload="stay")
TINY = ["run.steps=6", "sampling.max_tokens=16", "data.max_prompt_tokens=24", "batch.samples_per_prompt=8"]
LARGE = [
    "run.steps=5", "batch.samples_per_prompt=4", "sampling.max_tokens=128", "data.max_prompt_tokens=64",
    "batch.tokens_per_micro_batch=1536",
]  # fmt: skip
PROMPTS = "batch.prompts_per_step"


def copy_rate() -> float:
    """Return the bytes per second that one thread reads and writes."""
    import torch

    torch.set_num_threads(1)
    source = torch.zeros(2**26)
    target = torch.empty_like(source).copy_(source)
    start = time.perf_counter()
    for _ in range(5):
        target.copy_(source)
    return 2 * 5 * source.nbytes / (time.perf_counter() - start)


def measure(kept: Path | None) -> dict[str, Any]:
    """Run the recipe, and compute the fields of `Device` from the measurements.

    Args:
        kept: folder of measured runs, which are not repeated; None to measure all.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "tiny", folder / "28m"
        prepare_tiny(small)
        save_28m(large / "policy")
        save_prompts(large / "data")
        few, many = (run_at(small, [*TINY, f"{PROMPTS}={prompts}"], kept) for prompts in (2, 32))
        gathered, _ = run_at(small, [*TINY, f"{PROMPTS}=32"], kept, zero_stage=3)
        at = {
            precision: [
                run_at(large, [*LARGE, f"{PROMPTS}={prompts}", f"model.precision={precision}"], kept)
                for prompts in (2, 8)
            ]
            for precision in ("32-true", "bf16-true")
        }
        single = run_at(large, [*LARGE, f"{PROMPTS}=8", "model.precision=bf16-true"], kept, workers=1)
    bandwidth = copy_rate()
    decode_step, decode_sequence = decoding_costs(few, many)
    rates: dict[str, Any] = {
        "name": "cpu",
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "bandwidth": bandwidth,
        "decode_step_s": decode_step,
        "decode_sequence_s": decode_sequence,
        "train_flops": {},
        "sample_flops": {},
        "sample_bandwidth": {},
    }
    rates["tensor_s"] = tensor_s = tensor_seconds(many, at["32-true"][1])
    for runs in at.values():
        run, work = runs[1]
        rates["train_flops"][work.dtype] = training_rate(run, work, WORKERS, tensor_s)
        rate, read = sampling_rates(runs, decode_step, decode_sequence)
        rates["sample_flops"][work.engine_dtype], rates["sample_bandwidth"][work.engine_dtype] = rate, read
    rates["alone"] = training_rate(*single, 1, tensor_s) / rates["train_flops"]["bfloat16"]
    run, work = many
    longer = gathered.quiet("time/update_policy") - run.quiet("time/update_policy")
    # The hooks run in forward and backward passes. The communication of such a small model takes no time.
    rates["gather_s"] = max(0.0, longer) / (2 * tensor_passes(work, WORKERS))
    phases = ("time/rollout", "time/update_policy", "time/update_weights", "time/offload", "time/reload")
    rates["step_s"] = max(0.0, run.quiet("time/step") - sum(run.quiet(phase) for phase in phases))
    # Ranks communicate in shared memory, so a collective is a few copies.
    rates |= {"link": bandwidth / 4, "network": 1e9, "host_link": bandwidth}
    return rates | memory(few, [runs[1] for runs in at.values()], Device(**rates))


def tensor_seconds(small: tuple[MeasuredRun, Workload], large: tuple[MeasuredRun, Workload]) -> float:
    """Return the seconds of a pass for each tensor, from updates of two models with equal arithmetic rates."""
    (s, m, a), (t, n, b) = (
        (run.quiet("time/update_policy"), tensor_passes(work, WORKERS), training_flops(work, work.policy, WORKERS))
        for run, work in (small, large)
    )
    return max(0.0, (s - t * a / b) / (m - n * a / b))


def tensor_passes(work: Workload, workers: int) -> int:
    """Return the number of tensors in all passes of a trainer together."""
    return micro_batch_sizes(work, workers).passes * work.policy.tensors


def training_rate(run: MeasuredRun, work: Workload, workers: int, tensor_s: float) -> float:
    """Return the operations per second of a trainer, without the seconds for each tensor."""
    seconds = run.quiet("time/update_policy") - tensor_passes(work, workers) * tensor_s
    return training_flops(work, work.policy, workers) / seconds


def decoding_costs(few: tuple[MeasuredRun, Workload], many: tuple[MeasuredRun, Workload]) -> tuple[float, float]:
    """Return the seconds of a decoding step without responses, and the additional seconds for each response."""
    (a, b), (m, n) = [(run.quiet("time/rollout") / work.response_tokens, work.responses) for run, work in (few, many)]
    slope = max(0.0, (m - a) / (n - b))
    return max(0.0, a - slope * b), slope


def sampling_rates(
    runs: Sequence[tuple[MeasuredRun, Workload]], step_s: float, sequence_s: float
) -> tuple[float, float]:
    """Return the operations and bytes per second of each core in decoding, from runs with few and many responses."""
    rows, seconds = [], []
    for run, work in runs:
        context = work.prompt_tokens + work.response_tokens / 2
        flops = work.policy.forward_flops(work.responses * work.response_tokens, context)
        read = work.responses * prompt_tokens_of_sample(work, on_cpu=True)
        flops += work.policy.forward_flops(read, work.prompt_tokens / 2)
        width = work.engine_width
        each = work.policy.multiplied * width + work.responses * context * work.policy.kv_bytes(width)
        # The engine uses the cores of all workers.
        rows.append((flops / WORKERS, each * work.response_tokens / WORKERS))
        seconds.append(run.quiet("time/rollout") - work.response_tokens * (step_s + work.responses * sequence_s))
    (a, b), (c, d) = rows
    determinant = a * d - b * c
    return determinant / (seconds[0] * d - b * seconds[1]), determinant / (a * seconds[1] - seconds[0] * c)


def memory(
    few: tuple[MeasuredRun, Workload], larger: Sequence[tuple[MeasuredRun, Workload]], device: Device
) -> dict[str, float]:
    """Return the bytes of processes without a model, and the heap size divided by the live data of a pass."""
    run, work = few
    assert run.resident is not None
    start, end = run.steps[1]["time"], run.steps[-1]["time"]
    # All other processes are sampled once a second.
    sizes: dict[str, float] = {"machine_base": run.resident.others(start - 5, end)}
    sizes["trainer_base"] = run.resident.peak("RayTrainWorker", start, end) - total(update(work, device))
    engine = engine_memory(work, PLAN, device)["sampling"]
    sizes["engine_base"] = run.resident.peak("VLLMActor", start, end, shared=True) - total(engine)
    heaps = []
    for run, work in larger:
        assert run.resident is not None
        peak = run.resident.peak("RayTrainWorker", run.steps[0]["time"], run.steps[-1]["time"])
        parts = update(work, device)
        held = sum(parts[name] for name in ("gradients", "gathered", "activations"))
        heaps.append(1 + (peak - sizes["trainer_base"] - total(parts)) / held)
    return {**sizes, "fragments": max(1.0, fmean(heaps))}


def update(work: Workload, device: Device) -> dict[str, float]:
    """Return the parts of the memory of a trainer in the update, without fragments of the heap."""
    return trainer_memory(work, PLAN, replace(device, fragments=1.0))["update"]


def run_at(
    folder: Path, overrides: list[str], kept: Path | None, workers: int = WORKERS, zero_stage: int = 1
) -> tuple[MeasuredRun, Workload]:
    """Return a run, and the work of one of its steps with the mean length of the sampled responses."""
    name = "_".join(
        [folder.name, *(option.rpartition("=")[2] for option in overrides[-2:]), str(workers), str(zero_stage)]
    )
    file = kept / f"{name}.pickle" if kept else None
    if file and file.is_file():
        run: MeasuredRun = pickle.loads(file.read_bytes())
    else:
        further = (f"placement.num_workers={workers}", f"strategy.zero_stage={zero_stage}")
        run = run_grpo(folder, *overrides, *further, name=name, closely=True)
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pickle.dumps(run))
    work = work_of(folder / "policy", overrides)
    return run, replace(work, response_tokens=run.quiet("train/response_length"))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=CPU_FILE)
    parser.add_argument("--kept", type=Path, help="folder that keeps measured runs")
    arguments = parser.parse_args()
    output = arguments.output
    rates = measure(arguments.kept)
    Device(**rates)
    output.write_text(json.dumps(rates, indent=2) + "\n", encoding="utf-8")
    print(output.read_text(encoding="utf-8"))
    assert set(rates["train_flops"]) == set(DTYPE_BYTES)


if __name__ == "__main__":
    main()
