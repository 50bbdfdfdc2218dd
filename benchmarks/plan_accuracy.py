"""Memory and time of a step as `rl-plugins plan --device cpu` predicts them, compared with measurements.

`python -m benchmarks.plan_accuracy [--only PART ...] [--measured FILE]` runs the GRPO recipe with each setting and
prints predicted values, measured values and their ratios. Rates and the memory of libraries are those of the
calibration file, which is made from other runs (`python -m benchmarks.calibrate`). FILE keeps measurements, which are
then not repeated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from benchmarks.plan_work import work_of
from benchmarks.policies import save_28m, save_50m, save_prompts
from benchmarks.runs import run_grpo
from rl_plugins.planning.devices import CPU_FILE, GIB, Device, device_named
from rl_plugins.planning.memory import engine_memory, total, trainer_memory
from rl_plugins.planning.step_time import step_time
from rl_plugins.planning.workload import Plan

MODELS = {"28m": save_28m, "50m": save_50m}
COMMON = [
    "run.steps=4", "batch.prompts_per_step=8", "batch.samples_per_prompt=4", "data.max_prompt_tokens=64",
    "batch.tokens_per_micro_batch=1536",
]  # fmt: skip
MEMORY = {
    f"ZeRO-{stage} {precision}": ("28m", Plan(2, 1, zero_stage=stage, offload="stay"), precision, 128)
    for precision in ("32-true", "bf16-true")
    for stage in (1, 2, 3)
}
TIME = {
    "2 trainers, engine each, ZeRO-1": ("28m", Plan(2, 2, zero_stage=1, offload="stay"), "bf16-true", 128),
    "2 trainers, 1 engine, ZeRO-1": ("28m", Plan(2, 1, zero_stage=1, offload="stay"), "bf16-true", 128),
    "2 trainers, 1 engine, ZeRO-3, recomputing": ("28m", Plan(2, 1, offload="stay"), "bf16-true", 128),
    "1 trainer, 1 engine, ZeRO-1": ("28m", Plan(1, 1, zero_stage=1, offload="stay"), "bf16-true", 128),
    "50 M: 2 trainers, 1 engine, ZeRO-2": ("50m", Plan(2, 1, zero_stage=2, offload="stay"), "bf16-true", 192),
}
NOISE = 0.05
"""Relative difference of step times between runs of the same setting."""
RECOMPUTING = "model.gradient_checkpointing=true"


@dataclass(frozen=True)
class StepFigures:
    """Measured or predicted figures of a step.

    Attributes:
        trainer: largest bytes of a trainer.
        engine: largest bytes of an engine.
        step: seconds of a step.
        rollout: seconds of sampling.
        update: seconds of the update.
        response_tokens: mean tokens of a response.
    """

    trainer: float
    engine: float
    step: float
    rollout: float
    update: float
    response_tokens: float


def options(name: str) -> list[str]:
    """Return the options of the recipe for a setting."""
    _, plan, precision, max_tokens = {**MEMORY, **TIME}[name]
    return [
        *COMMON,
        f"model.precision={precision}",
        f"placement.num_workers={plan.trainers}",
        f"rollout.engines={plan.engines}",
        f"strategy.zero_stage={plan.zero_stage}",
        f"sampling.max_tokens={max_tokens}",
        *([RECOMPUTING] if "recomputing" in name else []),
    ]


def prepared(model: str, folder: Path) -> Path:
    """Return the folder of a model with its policy and prompts, and write both if the folder is missing."""
    here = folder / model
    if not here.exists():
        MODELS[model](here / "policy")
        save_prompts(here / "data")
    return here


def measure(name: str, folder: Path) -> StepFigures:
    """Run a setting and measure."""
    here = prepared({**MEMORY, **TIME}[name][0], folder)
    run = run_grpo(here, *options(name), name=f"run{len(list(here.iterdir()))}_{hash(name) % 10**6}", closely=True)
    assert run.resident is not None
    start, end = run.steps[0]["time"], run.steps[-1]["time"]
    return StepFigures(
        trainer=run.resident.peak("RayTrainWorker", start, end),
        engine=run.resident.peak("VLLMActor", start, end, shared=True),
        step=run.quiet("time/step"),
        rollout=run.quiet("time/rollout"),
        update=run.quiet("time/update_policy"),
        response_tokens=run.quiet("train/response_length"),
    )


def predict(name: str, device: Device, folder: Path, response_tokens: float) -> StepFigures:
    """Predict figures from the config.json of the model, the options and the mean length of a response."""
    model, plan, _, _ = {**MEMORY, **TIME}[name]
    policy = prepared(model, folder) / "policy"
    work = replace(work_of(policy, options(name)), response_tokens=response_tokens)
    time = step_time(work, plan, device, device.cores)
    trainer = trainer_memory(work, plan, device)["update"]
    engine = engine_memory(work, plan, device)["sampling"]
    return StepFigures(
        trainer=device.trainer_base + total(trainer),
        engine=device.engine_base + total(engine),
        step=time.step,
        rollout=time.rollout,
        update=time.update,
        response_tokens=response_tokens,
    )


def line(name: str, predicted: StepFigures, measured: StepFigures) -> str:
    """Return predicted value, measured value and ratio of each figure."""
    cells = [f"{name:44}"]
    for prediction, measurement, unit in (
        (predicted.trainer, measured.trainer, GIB),
        (predicted.engine, measured.engine, GIB),
        (predicted.rollout, measured.rollout, 1),
        (predicted.update, measured.update, 1),
        (predicted.step, measured.step, 1),
    ):
        cells.append(f"{prediction / unit:6.2f} {measurement / unit:6.2f} {prediction / measurement:5.2f}")
    return " |".join(cells)


def _similar(first: float, second: float) -> bool:
    return abs(first - second) <= NOISE * min(first, second)


def main() -> None:
    """Measure the settings that FILE does not have, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(MEMORY | TIME), help="parts of the names of settings")
    parser.add_argument("--measured", type=Path, help="file that keeps measurements")
    parser.add_argument("--calibration", type=Path, default=CPU_FILE)
    arguments = parser.parse_args()
    device = device_named("cpu", arguments.calibration)
    file = arguments.measured
    kept = json.loads(file.read_text()) if file and file.is_file() else {}
    names = [name for name in MEMORY | TIME if any(part in name for part in arguments.only)]
    header = "".join(f" |{kind:>20}" for kind in ("trainer, GiB", "engine, GiB", "rollout, s", "update, s", "step, s"))
    print(f"{'predicted, measured, ratio':44}{header}")
    steps: dict[str, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name not in kept:
                kept[name] = vars(measure(name, Path(folder)))
                if file:
                    file.write_text(json.dumps(kept, indent=1))
            measured = StepFigures(**kept[name])
            predicted = predict(name, device, Path(folder), measured.response_tokens)
            print(line(name, predicted, measured), flush=True)
            if name.startswith(("1", "2")) or name == "ZeRO-3 bf16-true":
                steps[name] = predicted.step, measured.step
    pairs = [(a, b) for a, b in combinations(steps.values(), 2) if not _similar(a[1], b[1])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    if pairs:
        print(
            f"{len(steps)} settings of one work; of their pairs, {len(pairs)} differ by more than {NOISE:.0%} in a step"
        )
        print(f"{right} of these are in the order as measured")


if __name__ == "__main__":
    main()
