"""What placements and schedules do from 8 to 1,024 devices, by the simulator: samples a second, idle shares, staleness.

`python -m benchmarks.scaling --picture docs/images/scaling.png` draws a model of 7 B parameters on H100s, whose rates
are those of their data sheets and shares that `rl_plugins/planning/devices.py` assumes. `--run RUN --device cpu` takes
the work of a run and what its phases took instead, as if devices like those it had were so many, and no farther apart.
The batch grows with the devices. Response lengths are log-normal. Of a split placement the division with the most
samples a second is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rl_plugins.commands.plan import workload_of
from rl_plugins.launch.config import parse_config
from rl_plugins.planning.devices import Device, device_named
from rl_plugins.planning.phase_times import corrected, planned
from rl_plugins.planning.placement import Placement
from rl_plugins.planning.shape import ModelShape
from rl_plugins.planning.simulator import Batch, Layout, Outcome, PhaseTimes, Schedule, log_normal, simulate
from rl_plugins.planning.workload import Workload
from rl_plugins.run_folder import RunFolder, read_metrics

SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
QWEN_7B = ModelShape(28, 3584, 18944, 28, 4, 128, 152064, attention_bias=4608, norms=7168)
WORK = Workload(
    QWEN_7B, prompts=32, samples=16, prompt_tokens=512, response_tokens=4000, max_tokens=16896,
    micro_batch_tokens=16896, gradient_checkpointing=True,
)  # fmt: skip
PER_NODE = 8
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2)
SCHEDULES = {
    "colocated, synchronous": (True, Schedule()),
    "split, synchronous": (False, Schedule()),
    "split, a quarter of a step dropped": (False, Schedule(0, 0.25)),
    "split, staleness 1": (False, Schedule(1)),
    "split, staleness 4, 1 step ahead": (False, Schedule(4, 1)),
}


@dataclass(frozen=True)
class Source:
    """Where phase times come from.

    Attributes:
        work: of so many devices.
        devices: their number.
        device: of one kind.
        measured: the placement and the metrics of a run; None where times are planned.
    """

    work: Workload
    devices: int
    device: Device
    measured: tuple[Placement, Mapping[str, Mapping[int, float]]] | None = None

    def times(self, work: Workload, place: Placement) -> PhaseTimes:
        """Of a placement; measured ones are those of a device, however many there are."""
        if self.measured is None:
            return planned(work, place, self.device, PER_NODE)
        place, metrics = self.measured
        times = planned(self.work, place, self.device, PER_NODE)
        return corrected(times, self.work, place, self.device, metrics)


def outcome(source: Source, devices: int, colocated: bool, schedule: Schedule, sigma: float) -> Outcome:
    """The best division's."""
    work = replace(source.work, prompts=source.work.prompts * devices // source.devices)
    trainers = [devices] if colocated else sorted({round(devices * share) for share in SHARES})
    lengths = log_normal(work.response_tokens, sigma, int(work.max_tokens - work.prompt_tokens))
    batch = Batch(work.prompts, work.samples, work.prompt_tokens, lengths)
    found = []
    for count in trainers:
        engines = devices if colocated else devices - count
        place = Placement(count, engines, colocated=colocated, ahead=0 if colocated else 1)
        layout = Layout(count, engines, colocated, work.max_num_seqs)
        found.append(simulate(source.times(work, place), layout, schedule, batch, steps=6))
    return max(found, key=lambda one: one.samples_per_s)


def of_run(folder: RunFolder, device: Device) -> Source:
    """The work and the phases of a run."""
    import yaml

    config = parse_config(yaml.safe_load(folder.config.read_text(encoding="utf-8")))
    metrics = read_metrics(folder.metrics)
    lengths = list(metrics["train/response_length"].values())
    work = workload_of(config, response_tokens=sum(lengths) / len(lengths))
    engines = config.placement.num_workers if config.rollout.engines == "per_worker" else int(config.rollout.engines)
    place = Placement(config.placement.num_workers, engines, zero_stage=config.strategy.zero_stage, offload="stay")
    return Source(work, place.trainers, device, (place, metrics))


def draw(results: Mapping[str, Mapping[int, Outcome]], path: Path) -> None:
    """Samples a second of a device, idle shares, staleness."""
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
    """Simulate, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--run", type=Path, help="the folder of a run on such devices")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of the lengths")
    parser.add_argument("--picture", type=Path, help="file to draw")
    arguments = parser.parse_args()
    device = device_named(arguments.device)
    source = of_run(RunFolder(arguments.run), device) if arguments.run else Source(WORK, PER_NODE, device)
    columns = ("s/step", "samples/s of each", "trainers idle", "engines idle", "staleness")
    print(f"{'':38}{'devices':>8}" + "".join(f"{name:>19}" for name in columns))
    results: dict[str, dict[int, Outcome]] = {}
    for name, (colocated, schedule) in SCHEDULES.items():
        for devices in SIZES:
            one = outcome(source, devices, colocated, schedule, arguments.sigma)
            results.setdefault(name, {})[devices] = one
            numbers = (one.step_s, one.samples_per_s / devices, one.trainer_idle, one.engine_idle, one.staleness)
            print(f"{name:38}{devices:8}" + "".join(f"{value:19.3g}" for value in numbers), flush=True)
    if arguments.picture:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()
