"""Step times, idle shares and staleness that the simulator predicts, over those of runs of the GRPO recipe.

`python -m benchmarks.simulator_accuracy [--models 24m 6m] [--schedules 0 1 2:0.5] [--measured FILE]` runs each model
twice with one engine and few or many prompts, takes the seconds of phases and the lengths of responses from that, and
predicts runs with more prompts, and with an engine for each trainer. A schedule is `schedule.max_staleness`, or that
and `schedule.ahead`. Other ones than 0 run with one trainer and one engine, a core for each, and are predicted from
runs in which these take turns. Responses end where the random policy happens to end them, so their lengths have a tail.
What was measured is kept in FILE, and not measured again.
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
from benchmarks.runs import quiet, run_grpo
from rl_plugins.planning.simulator import Batch, Layout, PhaseTimes, Schedule, measured, simulate

STEPS, SKIPPED, SAMPLES, MAX_TOKENS = 8, 2, 4, 256
# About one token in so many ends a response.
VOCABULARY = 272
MODELS = {"24m": (512, 8, 1408), "6m": (256, 8, 704)}
FITTED = (4, 12)
"""Prompts of the runs that phases are taken from, with one engine."""
SYNCHRONOUS = {"1 engine": (Layout(2, 1), 16), "engine each": (Layout(2, 2), 12)}
ASYNCHRONOUS = {"1 trainer, 1 engine": (Layout(1, 1, colocated=False), 12)}
"""Who there is in the runs that are predicted, and the prompts of a step."""


@dataclass(frozen=True)
class Seen:
    """Of each step of a run after the first: seconds of phases; idle shares and staleness, where the run has them."""

    steps: list[dict[str, float]]
    lengths: list[list[int]]

    def quiet(self, name: str) -> float | None:
        """The lower quartile over the steps that have it: what else a machine does only adds to a step."""
        values = [step[name] for step in self.steps if name in step]
        return quiet(values) if values else None

    def quiet_half(self) -> list[tuple[dict[str, float], list[int]]]:
        """The steps that took least for their tokens, each with the lengths of its responses."""
        pairs = sorted(zip(self.steps, self.lengths, strict=True), key=lambda pair: pair[0]["time/step"] / sum(pair[1]))
        return pairs[: (len(pairs) + 1) // 2]


def run(folder: Path, name: str, prompts: int, layout: Layout, further: Sequence[str] = ()) -> Seen:
    """Run, and read what happened."""
    from rl_plugins.data.experience import Experience

    found = run_grpo(
        folder, f"run.steps={STEPS}", f"batch.prompts_per_step={prompts}", f"batch.samples_per_prompt={SAMPLES}",
        f"sampling.max_tokens={MAX_TOKENS}", f"data.max_prompt_tokens={PROMPT_TOKENS}", "model.precision=bf16-true",
        "batch.tokens_per_micro_batch=1536", "strategy.zero_stage=1", f"debug.dump_rollouts={STEPS}",
        f"placement.num_workers={layout.trainers}", f"rollout.engines={layout.engines}", *further, name=name,
    )  # fmt: skip
    folders = sorted((folder / "outputs" / name / "rollouts").iterdir())
    lengths = [
        [n for file in sorted(step.glob("*.pt")) for n in Experience.load(file).response_lengths.tolist()]
        for step in folders
    ]
    return Seen(found.steps[SKIPPED:], lengths[SKIPPED:])


def fit(runs: Sequence[tuple[int, Seen]], trainers: int) -> PhaseTimes:
    """Seconds of phases, by least squares over the steps of runs with one engine."""
    import numpy as np

    training, rollouts = [], []
    for prompts, seen in runs:
        for step, lengths in seen.quiet_half():
            tokens = sum(lengths) + prompts * SAMPLES * PROMPT_TOKENS
            other = step["time/step"] - step["time/rollout"] - step.get("time/update_weights", 0.0)
            training.append((tokens / trainers, 1.0, other))
            rollouts.append((max(lengths), sum(lengths), prompts * PROMPT_TOKENS, step["time/rollout"]))
    a, b = np.array(training), np.array(rollouts)
    (token, fixed), *_ = np.linalg.lstsq(a[:, :2], a[:, 2])
    # A forward pass is a third of what training a token takes.
    (decode, sequence), *_ = np.linalg.lstsq(b[:, :2], b[:, 3] - b[:, 2] * token / 3)
    updates = [seen.quiet("time/update_weights") or 0.0 for _, seen in runs]
    return PhaseTimes(decode, sequence, token / 3, token, max(0.0, fixed), fmean(updates))


def predict(times: PhaseTimes, prompts: int, layout: Layout, schedule: Schedule, lengths: Sequence[int]) -> Any:
    """What the simulator says, with lengths drawn from those that were seen."""
    batch = Batch(prompts, SAMPLES, PROMPT_TOKENS, measured(lengths))
    return simulate(times, layout, schedule, batch, steps=100)


class Runs:
    """Runs of one model, each measured once.

    Args:
        model: which one.
        folder: for the model, its prompts and the runs.
        kept: what was measured, of all models.
        file: that keeps it.
    """

    def __init__(self, model: str, folder: Path, kept: dict[str, Any], file: Path | None) -> None:
        self.model = model
        self._folder, self._kept, self._file = folder, kept, file

    def seen(self, setting: str, prompts: int, layout: Layout, further: Sequence[str] = ()) -> Seen:
        """What happened in a run, which is made if it is not known."""
        key = f"{self.model}: {setting}, {prompts} prompts"
        if key not in self._kept:
            if not self._folder.exists():
                hidden, layers, intermediate = MODELS[self.model]
                save_policy(
                    self._folder / "policy", hidden_size=hidden, num_layers=layers, intermediate_size=intermediate,
                    vocab_size=VOCABULARY,
                )  # fmt: skip
                save_prompts(self._folder / "data")
            self._kept[key] = vars(run(self._folder, f"run{len(self._kept)}", prompts, layout, further))
            if self._file:
                self._file.write_text(json.dumps(self._kept))
        return Seen(**self._kept[key])


def compare(runs: Runs, who: str, trainers: int, schedules: Sequence[str]) -> None:
    """Take phases from runs that take turns, and print what they predict of schedules, over what was measured."""
    fitted = [(prompts, runs.seen(who, prompts, Layout(trainers, 1))) for prompts in FITTED]
    times = fit(fitted, trainers)
    lengths = [n for _, one in fitted for step in one.lengths for n in step]
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
        for name, (layout, prompts) in (ASYNCHRONOUS if wanted else SYNCHRONOUS).items():
            setting = name + (f", schedule {text}" if wanted else "")
            found = runs.seen(setting, prompts, layout, wanted)
            said = predict(times, prompts, layout, schedule, lengths)
            print(line(f"{runs.model}: {setting}", said, found), flush=True)


def main() -> None:
    """Measure what has not been, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--schedules", nargs="+", default=["0"], metavar="STALENESS[:AHEAD]")
    parser.add_argument("--measured", type=Path, help="a file that keeps what was measured")
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


def line(name: str, said: Any, found: Seen) -> str:
    """Predicted, measured and ratio; a run that does not know its idle shares or its staleness leaves them open."""
    cells = [f"{name:36}"]
    for predicted, key in (
        (said.step_s, "time/step"),
        (said.trainer_idle, "idle/trainer"),
        (said.engine_idle, "idle/engine"),
        (said.staleness, "rollout/staleness"),
    ):
        measured_value = found.quiet(key)
        seen = f"{measured_value:6.2f} {predicted / measured_value:5.2f}" if measured_value else f"{'-':>6} {'-':>5}"
        cells.append(f"{predicted:7.2f} {seen}")
    return " |".join(cells)


if __name__ == "__main__":
    main()
