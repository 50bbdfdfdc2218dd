"""Step times, idle shares and staleness as the simulator predicts them, compared with runs of the GRPO recipe.

`python -m benchmarks.simulator_accuracy [--models 24m 6m] [--schedules 0 1 2:0.5] [--measured FILE]` runs each model
twice with one engine, with few and with many prompts. The seconds of phases and the lengths of responses of these runs
predict runs with more prompts, and with an engine for each trainer. A schedule is `schedule.max_staleness`, with or
without `schedule.ahead`. Schedules other than 0 run with one trainer and one engine, a core for each; the predictions
are made from runs in which trainer and engine take turns. The random policy ends responses at random, so their lengths
have a tail. The first two steps of a run are left out. Phase times are fitted to all other steps, and predicted and
measured figures are means over steps. FILE keeps measurements, which are then not repeated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.policies import PROMPT_TOKENS, save_policy, save_prompts
from benchmarks.runs import run_grpo
from benchmarks.simulator import PhaseTimes, SimulatedStep, StepSamples, Workers, measured, simulate
from rl_plugins.config.sampling import Schedule

STEPS, SKIPPED, SAMPLES, MAX_TOKENS = 8, 2, 4, 256
# The random policy ends a response at a token with a probability of about 1 / VOCABULARY.
VOCABULARY = 272
MODELS = {"24m": (512, 8, 1408), "6m": (256, 8, 704)}
FITTED = (4, 12)
"""Prompts of the runs with one engine from which the phase times are fitted."""
SYNCHRONOUS = {"1 engine": (Workers(2, 1), 16), "engine each": (Workers(2, 2), 12)}
ASYNCHRONOUS = {"1 trainer, 1 engine": (Workers(1, 1, colocated=False), 12)}
"""Workers and prompts of a step of the predicted runs."""


@dataclass(frozen=True)
class MeasuredSteps:
    """Measurements of the steps of a run after the first steps.

    Attributes:
        steps: metrics of each step: seconds of phases, and idle shares and staleness where the run has them.
        lengths: response lengths of each step.
    """

    steps: list[dict[str, float]]
    lengths: list[list[int]]

    def mean(self, name: str) -> float | None:
        """Return the mean over the steps with the metric, as the simulator does."""
        values = [step[name] for step in self.steps if name in step]
        return fmean(values) if values else None


def run(folder: Path, name: str, prompts: int, workers: Workers, further: Sequence[str] = ()) -> MeasuredSteps:
    """Run the recipe, and read its measurements."""
    from rl_plugins.data.experience import Experience
    from rl_plugins.rewards.trajectory import RECORDS

    measured_run = run_grpo(
        folder, f"run.steps={STEPS}", f"batch.prompts_per_step={prompts}", f"batch.samples_per_prompt={SAMPLES}",
        f"sampling.max_tokens={MAX_TOKENS}", f"data.max_prompt_tokens={PROMPT_TOKENS}", "model.precision=bf16-true",
        "batch.tokens_per_micro_batch=1536", "strategy.zero_stage=1", f"debug.dump_rollouts={STEPS}",
        f"placement.num_workers={workers.trainers}", f"rollout.engines={workers.engines}", *further, name=name,
    )  # fmt: skip
    folders = sorted((folder / "outputs" / name / "rollouts").iterdir())
    lengths = [
        [n for file in sorted(step.glob("*.pt")) for n in Experience.load(file, RECORDS).response_lengths.tolist()]
        for step in folders
    ]
    return MeasuredSteps(measured_run.steps[SKIPPED:], lengths[SKIPPED:])


def fit(runs: Sequence[tuple[int, MeasuredSteps]], trainers: int) -> PhaseTimes:
    """Fit the seconds of phases to all steps of runs with one engine, by least squares.

    Predictions are compared with means over all steps, so slow steps count here, too.
    """
    import numpy as np

    training, rollouts = [], []
    for prompts, seen in runs:
        for step, lengths in zip(seen.steps, seen.lengths, strict=True):
            tokens = sum(lengths) + prompts * SAMPLES * PROMPT_TOKENS
            other = step["time/step"] - step["time/rollout"] - step.get("time/update_weights", 0.0)
            training.append((tokens / trainers, 1.0, other))
            rollouts.append((max(lengths), sum(lengths), prompts * PROMPT_TOKENS, step["time/rollout"]))
    a, b = np.array(training), np.array(rollouts)
    (token, fixed), *_ = np.linalg.lstsq(a[:, :2], a[:, 2])
    # A forward pass is a third of what training a token takes.
    (decode, sequence), *_ = np.linalg.lstsq(b[:, :2], b[:, 3] - b[:, 2] * token / 3)
    updates = [seen.mean("time/update_weights") or 0.0 for _, seen in runs]
    return PhaseTimes(decode, sequence, token / 3, token, max(0.0, fixed), fmean(updates))


def predict(
    times: PhaseTimes, prompts: int, workers: Workers, schedule: Schedule, lengths: Sequence[int]
) -> SimulatedStep:
    """Simulate with lengths that are drawn from measured lengths."""
    batch = StepSamples(prompts, SAMPLES, PROMPT_TOKENS, measured(lengths))
    return simulate(times, workers, schedule, batch, steps=100)


class Runs:
    """Runs of one model, each measured once.

    Args:
        model: name of the model.
        folder: folder for the model, its prompts and the runs.
        kept: measurements of all models.
        file: file that keeps the measurements.
    """

    def __init__(self, model: str, folder: Path, kept: dict[str, Any], file: Path | None) -> None:
        self.model = model
        self._folder, self._kept, self._file = folder, kept, file

    def measured(self, setting: str, prompts: int, workers: Workers, further: Sequence[str] = ()) -> MeasuredSteps:
        """Return the measurements of a run, and make the run if there are none."""
        key = f"{self.model}: {setting}, {prompts} prompts"
        if key not in self._kept:
            if not self._folder.exists():
                hidden, layers, intermediate = MODELS[self.model]
                save_policy(
                    self._folder / "policy", hidden_size=hidden, num_layers=layers, intermediate_size=intermediate,
                    vocab_size=VOCABULARY,
                )  # fmt: skip
                save_prompts(self._folder / "data")
            self._kept[key] = vars(run(self._folder, f"run{len(self._kept)}", prompts, workers, further))
            if self._file:
                self._file.write_text(json.dumps(self._kept))
        return MeasuredSteps(**self._kept[key])


def compare(runs: Runs, who: str, trainers: int, schedules: Sequence[str]) -> None:
    """Fit phase times to runs in which trainer and engine take turns, and print predictions beside measurements."""
    fitted = [(prompts, runs.measured(who, prompts, Workers(trainers, 1))) for prompts in FITTED]
    times = fit(fitted, trainers)
    lengths = [n for _, seen in fitted for step in seen.lengths for n in step]
    print(
        f"{runs.model}, {trainers} trainer(s): a step of decoding {times.decode_step_s * 1e3:.1f} ms and "
        f"{times.decode_sequence_s * 1e3:.2f} of each response, training "
        f"{times.train_token_s * 1e3:.3f} ms a token and {times.train_fixed_s:.2f} s"
    )
    for text in schedules:
        staleness, _, ahead = text.partition(":")
        schedule = Schedule(int(staleness), float(ahead) if ahead else None)
        wanted = [f"schedule.max_staleness={staleness}"] if schedule.max_staleness else []
        wanted += [f"schedule.ahead={ahead}"] if ahead else []
        for name, (workers, prompts) in (ASYNCHRONOUS if wanted else SYNCHRONOUS).items():
            setting = name + (f", schedule {text}" if wanted else "")
            measured_steps = runs.measured(setting, prompts, workers, wanted)
            predicted = predict(times, prompts, workers, schedule, lengths)
            print(line(f"{runs.model}: {setting}", predicted, measured_steps), flush=True)


def main() -> None:
    """Make the runs that FILE does not have, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=["0"], metavar="STALENESS[:AHEAD]")
    parser.add_argument("--measured", type=Path, help="file that keeps measurements")
    arguments = parser.parse_args()
    file = arguments.measured
    kept: dict[str, Any] = json.loads(file.read_text()) if file and file.is_file() else {}
    columns = ("step, s", "trainers idle", "engines idle", "staleness")
    print(f"{'predicted, measured, ratio':36}" + "".join(f" |{name:>20}" for name in columns))
    in_turns = [text for text in arguments.schedules if text == "0"]
    running_ahead = [text for text in arguments.schedules if text != "0"]
    with tempfile.TemporaryDirectory() as name:
        for model in arguments.models:
            runs = Runs(model, Path(name) / model, kept, file)
            if in_turns:
                compare(runs, "1 engine", 2, in_turns)
            if running_ahead:
                compare(runs, "1 trainer, 1 engine", 1, running_ahead)


def line(name: str, predicted: SimulatedStep, measured_steps: MeasuredSteps) -> str:
    """Return prediction, measurement and ratio of each figure; a missing measurement is shown as `-`."""
    cells = [f"{name:36}"]
    for prediction, key in (
        (predicted.step_s, "time/step"),
        (predicted.trainer_idle, "idle/trainer"),
        (predicted.engine_idle, "idle/engine"),
        (predicted.staleness, "rollout/staleness"),
    ):
        measurement = measured_steps.mean(key)
        shown = f"{measurement:6.2f} {prediction / measurement:5.2f}" if measurement else f"{'-':>6} {'-':>5}"
        cells.append(f"{prediction:7.2f} {shown}")
    return " |".join(cells)


if __name__ == "__main__":
    main()
