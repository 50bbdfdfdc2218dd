"""Simulated effect of placements and schedules from 8 to 1,024 devices: samples per second, idle shares, staleness.

`python -m benchmarks.scaling --picture docs/images/scaling.png` draws a model of 7 B parameters on H100s. The rates are
those of the data sheets and the shares that `rl_plugins/planning/devices.py` assumes. `--run RUN --device cpu` takes
the work and the measured phases of a run instead, and assumes more devices of the same kind at the same distances. The
run must be synchronous, with colocated engines.
The batch grows with the number of devices. Response lengths are log-normal. For a split placement the benchmark shows
the division with the most samples per second.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.simulator import (
    PhaseTimes,
    SimulatedStep,
    StepSamples,
    Workers,
    log_normal,
    simulate,
)
from rl_plugins.commands.plan import workload_of
from rl_plugins.config.recipe import parse_config
from rl_plugins.config.sampling import Schedule
from rl_plugins.errors import ConfigError
from rl_plugins.planning.devices import Device, device_named
from rl_plugins.planning.memory import prompt_tokens_of_sample
from rl_plugins.planning.shape import ModelShape
from rl_plugins.planning.step_time import engine_devices, step_time
from rl_plugins.planning.workload import Plan, Workload
from rl_plugins.run_folder import RunFolder, read_metrics

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
QWEN_7B = ModelShape(28, 3584, 18944, 28, 4, 128, 152064, attention_bias=4608, norms=7168)
WORK = Workload(
    QWEN_7B, prompts=32, samples=16, prompt_tokens=512, response_tokens=4000, max_tokens=16896,
    micro_batch_tokens=16896, gradient_checkpointing=True,
)  # fmt: skip
PER_NODE = 8
LOG_PROBS = ("time/old_log_probs", "time/ref_log_probs", "time/teacher_log_probs")
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)
SCHEDULES = {
    "colocated, synchronous": (True, Schedule()),
    "split, synchronous": (False, Schedule()),
    "split, a quarter of a step dropped": (False, Schedule(0, 0.25)),
    "split, staleness 1": (False, Schedule(1)),
    "split, staleness 4, 1 step ahead": (False, Schedule(4, 1)),
}


Metrics = Mapping[str, Mapping[int, float]]
"""Values of each metric by step."""


def planned_phase_times(work: Workload, plan: Plan, device: Device, devices_per_node: int) -> PhaseTimes:
    """Return the phase times of a placement by the arithmetic of `rl-plugins plan`."""
    time = step_time(work, plan, device, devices_per_node)
    tokens = work.responses * work.sample_tokens / plan.trainers
    width, devices = work.engine_width, engine_devices(plan, device)
    bandwidth, flops = (rates[work.engine_dtype] * devices for rates in (device.sample_bandwidth, device.sample_flops))
    read = work.samples * prompt_tokens_of_sample(work, on_cpu=device.is_cpu) / work.prompt_tokens
    context = work.prompt_tokens + work.response_tokens / 2
    reading = context * work.policy.kv_bytes(width) / bandwidth
    multiplying = work.policy.forward_flops(1, context) / flops
    return PhaseTimes(
        decode_step_s=device.decode_step_s + work.policy.multiplied * width / bandwidth,
        # An accelerator multiplies while it reads.
        decode_sequence_s=device.decode_sequence_s + reading + (multiplying if device.is_cpu else 0.0),
        prefill_token_s=read * work.policy.forward_flops(1, work.prompt_tokens / 2) / flops,
        train_token_s=(time.update + time.log_probs) / tokens,
        train_fixed_s=time.other,
        update_weights_s=time.update_weights,
        move_s=time.move,
    )


def corrected_phase_times(
    times: PhaseTimes, work: Workload, plan: Plan, device: Device, metrics: Metrics
) -> PhaseTimes:
    """Scale planned phase times to the measured times of a run.

    Args:
        times: planned times for the work and placement of the run, or for others with the same model and device.
        work: work of the run.
        plan: placement of the run.
        device: device of the run.
        metrics: metrics of the run, as `read_metrics` returns. The first step is ignored, because it warms up.
    """
    measured = {name: median(list(series.values())[1:] or series.values()) for name, series in metrics.items()}
    planned = step_time(work, plan, device, plan.trainers)
    sampling = measured["time/rollout"] / planned.rollout
    log_probs = sum(measured.get(phase, 0.0) for phase in LOG_PROBS)
    # Both take time for each token.
    training = (measured["time/update_policy"] + log_probs) / (planned.update + planned.log_probs)
    phases = ("time/rollout", "time/update_policy", "time/update_weights", *LOG_PROBS)
    return replace(
        times,
        decode_step_s=times.decode_step_s * sampling,
        decode_sequence_s=times.decode_sequence_s * sampling,
        prefill_token_s=times.prefill_token_s * sampling,
        train_token_s=times.train_token_s * training,
        train_fixed_s=measured["time/step"] - sum(measured.get(phase, 0.0) for phase in phases),
        update_weights_s=times.update_weights_s * measured.get("time/update_weights", 0.0) / planned.update_weights,
    )


@dataclass(frozen=True)
class PhaseSource:
    """Source of phase times.

    Attributes:
        work: work of a step on `devices` devices.
        devices: number of devices.
        device: device.
        measured: placement and metrics of a run; None for planned times.
    """

    work: Workload
    devices: int
    device: Device
    measured: tuple[Plan, Metrics] | None = None

    def times(self, work: Workload, plan: Plan) -> PhaseTimes:
        """Return the phase times of a placement. Measured times are the same for every number of devices."""
        if self.measured is None:
            return planned_phase_times(work, plan, self.device, PER_NODE)
        plan, metrics = self.measured
        times = planned_phase_times(self.work, plan, self.device, PER_NODE)
        return corrected_phase_times(times, self.work, plan, self.device, metrics)


def best_step(source: PhaseSource, devices: int, colocated: bool, schedule: Schedule, sigma: float) -> SimulatedStep:
    """Simulate a step of the division of the devices with the most samples per second."""
    work = replace(source.work, prompts=source.work.prompts * devices // source.devices)
    trainers = [devices] if colocated else sorted({round(devices * share) for share in SHARES})
    lengths = log_normal(work.response_tokens, sigma, int(work.max_tokens - work.prompt_tokens))
    batch = StepSamples(work.prompts, work.samples, work.prompt_tokens, lengths)
    simulated: list[SimulatedStep] = []
    for count in trainers:
        engines = devices if colocated else devices - count
        plan = Plan(count, engines, colocated=colocated, ahead=0 if colocated else 1)
        workers = Workers(count, engines, colocated, work.max_num_seqs)
        simulated.append(simulate(source.times(work, plan), workers, schedule, batch, steps=6))
    return max(simulated, key=lambda step: step.samples_per_s)


def of_run(folder: RunFolder, device: Device) -> PhaseSource:
    """Return the work and the measured phases of a run.

    Raises:
        ConfigError: the run sampled ahead of training or on devices of its own, so its phases overlap.
    """
    import yaml

    config = parse_config(yaml.safe_load(folder.config.read_text(encoding="utf-8")))
    for option, value, needed in (
        ("schedule.max_staleness", config.schedule.max_staleness, 0),
        ("placement.rollout", config.placement.rollout, "colocated"),
    ):
        if value != needed:
            raise ConfigError(f"--run {folder.path}: it has {option}={value}: give a run with {option}={needed}")
    metrics = read_metrics(folder.metrics)
    lengths = list(metrics["train/response_length"].values())
    work = workload_of(config, response_tokens=sum(lengths) / len(lengths))
    engines = config.num_engines
    plan = Plan(config.placement.num_workers, engines, zero_stage=config.strategy.zero_stage, offload="stay")
    return PhaseSource(work, plan.trainers, device, (plan, metrics))


def draw(results: Mapping[str, Mapping[int, SimulatedStep]], path: Path) -> None:
    """Draw samples per second of a device, idle shares and staleness."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(15, 3.8), layout="constrained")
    titles = ("samples/s of a device", "idle share of trainers", "idle share of engines", "staleness of a token")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="devices", xscale="log", xticks=SIZES[::2], xticklabels=SIZES[::2])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    for name, outcomes in results.items():
        rows = [(o.samples_per_s / n, o.trainer_idle, o.engine_idle, o.staleness) for n, o in outcomes.items()]
        for axis, values in zip(axes, zip(*rows, strict=True), strict=True):
            axis.plot(list(outcomes), values, marker="o", markersize=3, label=name)
    for axis in axes:
        axis.set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(results), frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Simulate, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--run", type=Path, help="the folder of a run on such devices")
    parser.add_argument("--sigma", type=float, default=0.8, help="standard deviation of the logarithm of the lengths")
    parser.add_argument("--picture", type=Path, help="file to draw")
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    source = of_run(RunFolder(arguments.run), device) if arguments.run else PhaseSource(WORK, PER_NODE, device)
    columns = ("s/step", "samples/s of each", "trainers idle", "engines idle", "staleness")
    print(f"{'':38}{'devices':>8}" + "".join(f"{name:>19}" for name in columns))
    results: dict[str, dict[int, SimulatedStep]] = {}
    for name, (colocated, schedule) in SCHEDULES.items():
        for devices in SIZES:
            step = best_step(source, devices, colocated, schedule, arguments.sigma)
            results.setdefault(name, {})[devices] = step
            numbers = (step.step_s, step.samples_per_s / devices, step.trainer_idle, step.engine_idle, step.staleness)
            print(f"{name:38}{devices:8}" + "".join(f"{value:19.3g}" for value in numbers), flush=True)
    if arguments.picture:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()
