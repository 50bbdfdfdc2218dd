"""Figures of a run, and its validation samples."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NotRequired, TypedDict

from rl_plugins.json_text import read_foreign_json
from rl_plugins.report.charts import Series
from rl_plugins.run_folder import RunFolder, read_metrics

_REQUIRED = {"prompt", "response", "score", "ground_truth", "failure"}
"""Keys of each row of a samples file."""
_SECONDS = ("sampling_s", "environment_s", "queue_s")
"""Times of a turn that the report shows."""


@dataclass(frozen=True)
class RunSummary:
    """Figures of one run.

    Attributes:
        before: validation reward before the first step; NaN without validations.
        after: validation reward after the last step; NaN without validations.
        samples_per_s: median over the steps; 0 for stages that do not sample.
        step_s: median seconds of a step.
        phases_s: median seconds of each phase. Phases with a median below a millisecond are left out.
        gap_max: largest trainer/sampler log-prob gap, in nats.
    """

    before: float
    after: float
    samples_per_s: float
    step_s: float
    phases_s: dict[str, float]
    gap_max: float


def summarize(folder: RunFolder) -> RunSummary:
    """Return the figures of the metrics file of a run."""
    return summarize_metrics(read_metrics(folder.metrics))


def summarize_metrics(series: Series) -> RunSummary:
    """Return the figures of metrics without NaN and infinity, as `read_metrics` returns."""
    validation = list(series.get("val/reward", {}).values()) or [float("nan")]
    return RunSummary(
        before=validation[0],
        after=validation[-1],
        samples_per_s=_median(series, "samples_per_s"),
        step_s=_median(series, "time/step"),
        phases_s={
            name.removeprefix("time/"): _median(series, name)
            for name in series
            if name.startswith("time/") and name != "time/step" and _median(series, name) >= 0.001
        },
        gap_max=max(series.get("train/rollout_gap_max", {0: 0.0}).values()),
    )


def _median(series: Series, name: str) -> float:
    values = list(series.get(name, {}).values())
    return median(values) if values else 0.0


class ValidationSample(TypedDict):
    """One row of a samples file, as the callback `SampleTable` writes it."""

    prompt: str
    response: str
    score: float | None
    ground_truth: object
    failure: str | None
    images: NotRequired[list[str]]
    turns: NotRequired[list[dict[str, Any]]]


@dataclass(frozen=True)
class SamplePair:
    """Samples of one prompt at two validations.

    Attributes:
        prompt: text of the prompt.
        ground_truth: ground truth in the data.
        first: sample of the first validation; None if the validation has no sample for the prompt.
        last: sample of the last validation; None if the validation has no sample for the prompt.
    """

    prompt: str
    ground_truth: object
    first: ValidationSample | None
    last: ValidationSample | None

    @property
    def images(self) -> list[str]:
        """Images of the prompt, as data URIs."""
        sample = self.first or self.last
        images = [] if sample is None else sample.get("images", [])
        return [image for image in images if image.startswith("data:image/")]


def pair_samples(first: Sequence[ValidationSample], last: Sequence[ValidationSample]) -> list[SamplePair]:
    """Pair the n-th sample of a prompt in `first` with the n-th sample of the same prompt in `last`."""
    unpaired: dict[tuple[str, ...], list[ValidationSample]] = defaultdict(list)
    for sample in last:
        unpaired[_prompt_of(sample)].append(sample)
    pairs = []
    for sample in first:
        prompt, candidates = str(sample["prompt"]), unpaired[_prompt_of(sample)]
        pairs.append(SamplePair(prompt, sample["ground_truth"], sample, candidates.pop(0) if candidates else None))
    rest = [sample for samples in unpaired.values() for sample in samples]
    return pairs + [SamplePair(str(sample["prompt"]), sample["ground_truth"], None, sample) for sample in rest]


def _prompt_of(sample: ValidationSample) -> tuple[str, ...]:
    return (str(sample["prompt"]), *sample.get("images", ()))


def read_samples(file: Path) -> list[ValidationSample] | None:
    """Return the rows of a samples file; None if the file is damaged, or cannot be read."""
    try:
        rows: Any = read_foreign_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    return rows if isinstance(rows, list) and all(map(_is_sample, rows)) else None


def _is_sample(row: Any) -> bool:
    """Return True if the values of a row have the types of `ValidationSample`."""
    if not isinstance(row, dict) or not row.keys() >= _REQUIRED:
        return False
    images, turns = row.get("images", []), row.get("turns", [])
    return (
        (bool(row["failure"]) or _is_finite(row["score"]))
        and isinstance(images, list)
        and all(isinstance(image, str) for image in images)
        and isinstance(turns, list)
        and all(isinstance(turn, dict) and all(_is_finite(turn.get(name)) for name in _SECONDS) for turn in turns)
    )


def _is_finite(value: Any) -> bool:
    # JSON has whole numbers that no float has.
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def validation_step(file: Path) -> int:
    """Return the step in the name of a samples file."""
    return int(file.stem.removeprefix("step_"))
