"""Scored samples: their measures by data source, and two policies compared prompt by prompt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_plugins.data.parquet import COLUMNS, Row, load_rows
from rl_plugins.errors import ConfigError
from rl_plugins.evaluation.generation import COLUMNS as SAMPLE_COLUMNS
from rl_plugins.evaluation.measures import Summary, measure, sizes_up_to, summarize
from rl_plugins.evaluation.statistics import Interval, bootstrap_mean
from rl_plugins.rewards.failures import failure_counts
from rl_plugins.rewards.records import Score, ScoringRequest

ALL = "all"
"""The data source of all prompts together."""

Measures = dict[str, float]


@dataclass(frozen=True)
class Results:
    """What a file of samples is worth.

    Attributes:
        path: of the file.
        samples_per_prompt: responses to each prompt.
        summary: intervals of each data source, and of all prompts.
        failures: samples whose reward failed, by kind.
        truncated: share of responses that ended at the longest length.
        response_length: mean tokens of a response.
        prompts: measures of each prompt, by what identifies it.
    """

    path: Path
    samples_per_prompt: int
    summary: Summary
    failures: dict[str, int]
    truncated: float
    response_length: float
    prompts: dict[str, Measures]

    def plain(self) -> dict[str, Any]:
        """As JSON takes it, without the single prompts."""
        return {
            "samples": str(self.path),
            "prompts": len(self.prompts),
            "samples_per_prompt": self.samples_per_prompt,
            "failures": self.failures,
            "truncated": self.truncated,
            "response_length": self.response_length,
            "measures": plain_summary(self.summary),
        }


def load_samples(path: Path) -> Sequence[Row]:
    """The rows of a file that `generate` made, or of one with the same columns.

    Raises:
        ConfigError: a column is missing, a row is malformed, or rows have different numbers of responses.
    """
    rows = [*load_rows(path, (*COLUMNS, *SAMPLE_COLUMNS))]
    size = len(rows[0]["responses"] or ())
    for number, row in enumerate(rows):
        if not size or any(len(row[name] or ()) != size for name in SAMPLE_COLUMNS):
            raise ConfigError(f"{path}, row {number}: every row must have as many responses as the first, {size}")
    return rows


def requests(rows: Sequence[Row]) -> list[ScoringRequest]:
    """What is scored: each response of each row."""
    return [
        ScoringRequest(
            row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"], row["prompt"]
        )
        for row in rows
        for response in row["responses"]
    ]


def evaluate(
    path: Path, rows: Sequence[Row], scores: Sequence[Score], answer_of: Callable[[str], str], right_from: float
) -> Results:
    """Measure every prompt and sum up.

    Args:
        path: of the file of samples.
        rows: its rows.
        scores: of each response of each row.
        answer_of: the answer in a response, for the vote.
        right_from: score from which a sample is right.
    """
    size = len(rows[0]["responses"])
    measures = []
    for number, row in enumerate(rows):
        values = [score.value for score in scores[number * size : (number + 1) * size]]
        answers = [str(answer_of(response)) for response in row["responses"]]
        measures.append(measure(values, answers, sizes_up_to(size), right_from=right_from))
    reasons = Counter(reason for row in rows for reason in row["finish_reasons"])
    return Results(
        path=path,
        samples_per_prompt=size,
        summary=_with_all([row["data_source"] for row in rows], measures),
        failures={kind: count for kind, count in failure_counts(scores).items() if count},
        truncated=reasons["length"] / reasons.total(),
        response_length=sum(sum(row["response_lengths"]) for row in rows) / reasons.total(),
        prompts=dict(zip(_identities(rows), measures, strict=True)),
    )


@dataclass(frozen=True)
class Comparison:
    """How much better the second of two policies is.

    Attributes:
        summary: differences, second less first, of each measure that both have.
        unpaired: prompts that only one of them has.
    """

    summary: dict[str, Interval]
    unpaired: int

    def sentence(self, first: str, second: str) -> str:
        """What the difference of the means says."""
        name = next(iter(self.summary))
        of = self.summary[name]
        said = f"{of.value:+.3f} (95 % interval {of.low:+.3f} to {of.high:+.3f}, {of.prompts} prompts)"
        if of.low > 0 or of.high < 0:
            return f"{second} is {'better' if of.value > 0 else 'worse'} than {first}: mean score {said}"
        return f"no difference between {first} and {second} can be told: mean score {said}"

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {"unpaired": self.unpaired, "difference": {name: asdict(of) for name, of in self.summary.items()}}


def compare(first: Results, second: Results) -> Comparison:
    """Second less first, prompt by prompt.

    Raises:
        ConfigError: they have no prompt in common.
    """
    common = [identity for identity in first.prompts if identity in second.prompts]
    if not common:
        raise ConfigError(f"{first.path} and {second.path} have no prompt in common: sample the same data twice")
    differences: dict[str, list[float]] = {}
    for identity in common:
        before, after = _means_named_alike(first.prompts[identity]), _means_named_alike(second.prompts[identity])
        for name in [name for name in after if name in before]:
            differences.setdefault(name, []).append(after[name] - before[name])
    summary = {name: bootstrap_mean(values) for name, values in differences.items() if any(v == v for v in values)}
    if "mean" not in summary:
        raise ConfigError(f"{first.path} and {second.path} have no prompt in common whose samples were scored")
    return Comparison(summary, len(first.prompts.keys() ^ second.prompts.keys()))


def plain_summary(summary: Summary) -> dict[str, dict[str, Any]]:
    """As JSON takes it."""
    return {source: {name: asdict(of) for name, of in measures.items()} for source, measures in summary.items()}


def _with_all(sources: Sequence[str], measures: Sequence[Measures]) -> Summary:
    summary = summarize(sources, measures)
    return summary if len(summary) == 1 else {**summary, **summarize([ALL] * len(measures), measures)}


def _means_named_alike(measures: Measures) -> Measures:
    """The mean of 8 samples estimates the same as the mean of 4."""
    return {"mean" if name.startswith("mean@") else name: value for name, value in measures.items()}


def _identities(rows: Sequence[Row]) -> list[str]:
    """The source and the messages of each row, and how often they stood there before."""
    seen: Counter[str] = Counter()
    identities = []
    for row in rows:
        identity = json.dumps([row["data_source"], row["prompt"], row["reward_model"]["ground_truth"]], default=str)
        identities.append(f"{identity} {seen[identity]}")
        seen[identity] += 1
    return identities
