"""Scores of samples: measures by data source, and the comparison of two policies prompt by prompt.

Files of samples stay on disk. Only a few rows, and a few numbers per prompt, are in memory.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.data.parquet import COLUMNS, PromptRows, Row, load_rows
from rl_plugins.errors import ConfigError
from rl_plugins.evaluation.generation import COLUMNS as SAMPLE_COLUMNS
from rl_plugins.evaluation.generation import SCORED_COLUMNS
from rl_plugins.evaluation.measures import (
    Interval,
    Summary,
    bootstrap_mean,
    measure,
    sizes_up_to,
    summarize_columns,
)
from rl_plugins.rewards.records import (
    Score,
    ScoringRequest,
    failed,
    failure_counts,
    scoring_request,
    too_many,
)

ALL = "all"
"""Name of the data source for all prompts together."""

_CHUNK = 256


@dataclass(frozen=True)
class Samples:
    """A file of samples on disk.

    Attributes:
        path: path of the file.
        rows: one row per prompt, with the lists of its samples.
        size: number of samples per prompt.
        is_scored: True for conversations, which their environment has scored.
    """

    path: Path
    rows: PromptRows
    size: int
    is_scored: bool


@dataclass(frozen=True)
class Results:
    """Measures of a file of samples.

    Attributes:
        path: path of the file.
        samples_per_prompt: number of samples per prompt.
        summary: intervals of each data source, and of all prompts together.
        failures: number of samples with a failed reward, by kind of failure.
        truncated: share of responses cut off at the length limit.
        response_length: mean number of tokens of a response.
        prompts: number of each prompt, by the prompt's digest.
        measures: float64 [G] under the name of each measure; NaN for a prompt whose rewards failed.
    """

    path: Path
    samples_per_prompt: int
    summary: Summary
    failures: dict[str, int]
    truncated: float
    response_length: float
    prompts: dict[bytes, int]
    measures: dict[str, np.ndarray]

    def plain(self) -> dict[str, Any]:
        """Return the results as JSON values, without the values of single prompts."""
        return {
            "samples": str(self.path),
            "prompts": len(self.prompts),
            "samples_per_prompt": self.samples_per_prompt,
            "failures": self.failures,
            "truncated": self.truncated,
            "response_length": self.response_length,
            "measures": plain_summary(self.summary),
        }


def load_samples(path: Path) -> Samples:
    """Open a file of `generate`, or a file with the same columns.

    Raises:
        ConfigError: a column is missing, a row is malformed, rows differ in the number of responses, or one of several
            data sources has the name of all together.
    """
    rows = load_rows(path, (*COLUMNS, *SAMPLE_COLUMNS))
    is_scored = set(SCORED_COLUMNS) <= set(rows.columns)
    lists = (*SAMPLE_COLUMNS, *(SCORED_COLUMNS if is_scored else ()))
    size, sources = len(rows.rows[0]["responses"] or ()), set()
    for number, row in enumerate(rows):
        if not size or any(len(row[name] or ()) != size for name in lists):
            raise ConfigError(f"{path}, row {number}: every row must have as many responses as the first, {size}")
        sources.add(row["data_source"])
    check_sources(path, sources)
    return Samples(path, rows, size, is_scored)


def check_sources(file: Path | str, sources: Set[str]) -> None:
    """Check the data sources of prompts.

    Args:
        file: file of the prompts, for the message.
        sources: names of the data sources.

    Raises:
        ConfigError: one of several data sources has the name of all together.
    """
    if ALL in sources and len(sources) > 1:
        raise ConfigError(
            f"{file}: the data source {ALL!r} has the name of all prompts together: give the data source another name"
        )


def evaluate(
    samples: Samples,
    score: Callable[[Sequence[ScoringRequest]], Sequence[Score]] | None,
    answer_of: Callable[[str], str],
    *,
    right_from: float,
    max_failure_rate: float,
) -> Results:
    """Score a few rows at a time, measure every prompt and summarise.

    Args:
        samples: the samples.
        score: function that scores samples, such as a scorer's `score`; None for samples with scores.
        answer_of: function that returns the answer in a response, for maj@k.
        right_from: score from which a sample is right.
        max_failure_rate: largest share of all samples with a failed reward.

    Raises:
        RewardError: the rewards of more samples failed; raised as soon as the share is certain.
    """
    size, total = samples.size, samples.size * len(samples.rows)
    prompts, sources, repeats = dict[bytes, int](), list[str](), Counter[bytes]()
    values, names = array("d"), list[str]()
    failed, examples = list[Score](), dict[str, Score]()
    reasons, tokens = Counter[str](), 0
    for rows in samples.rows.chunks(_CHUNK):
        scores = _scores(rows) if score is None else score(_requests(rows))
        # To save memory, all failures of a kind share one message.
        failed += [examples.setdefault(result.failure, result) for result in scores if result.failure is not None]
        if len(failed) > max_failure_rate * total:
            raise too_many(failed, len(failed), total, max_failure_rate)
        for number, row in enumerate(rows):
            row_scores = [result.value for result in scores[number * size : (number + 1) * size]]
            answers = [str(answer_of(answer)) for answer in row["answers" if samples.is_scored else "responses"]]
            measures = measure(row_scores, answers, sizes_up_to(size), right_from=right_from)
            names = list(measures)
            values.extend(measures.values())
            sources.append(sys.intern(row["data_source"]))
            prompts[_identity(row, prompts, repeats)] = len(prompts)
            reasons.update(row["finish_reasons"])
            tokens += sum(row["response_lengths"])
    columns = dict(zip(names, np.asarray(values).reshape(-1, len(names)).T, strict=True))
    return Results(
        path=samples.path,
        samples_per_prompt=size,
        summary=_with_all(sources, columns),
        failures={kind: count for kind, count in failure_counts(failed).items() if count},
        truncated=reasons["length"] / total,
        response_length=tokens / total,
        prompts=prompts,
        measures=columns,
    )


def _scores(rows: Sequence[Row]) -> list[Score]:
    """Return the scores in the rows."""
    return [
        Score(value) if failure is None else failed(failure, fault or "the environment gave no score")
        for row in rows
        for value, failure, fault in zip(
            row["scores"], row["failures"], row.get("faults") or [""] * len(row["scores"]), strict=True
        )
    ]


def _requests(rows: Sequence[Row]) -> list[ScoringRequest]:
    """Return a request for each response of each row."""
    return [scoring_request(response, row) for row in rows for response in row["responses"]]


def _identity(row: Row, known: Mapping[bytes, int], repeats: Counter[bytes]) -> bytes:
    """Return a digest of the row's data source, messages and ground truth; a repeated row gets a number too."""
    content = json.dumps([row["data_source"], row["prompt"], row["reward_model"]["ground_truth"]], default=str)
    identity = blake2b(content.encode(), digest_size=16).digest()
    if identity not in known:
        return identity
    repeats[identity] += 1
    return identity + repeats[identity].to_bytes(8, "little")


@dataclass(frozen=True)
class PolicyComparison:
    """Difference between two policies, second minus first.

    Attributes:
        summary: interval of the difference, by measure.
        unpaired: number of prompts in only one of the two files.
    """

    summary: dict[str, Interval]
    unpaired: int

    def sentence(self, first: str, second: str) -> str:
        """Return the difference of the mean scores in words."""
        mean = next(iter(self.summary.values()))
        numbers = f"{mean.value:+.3f} (95 % interval {mean.low:+.3f} to {mean.high:+.3f}, {mean.prompts} prompts)"
        # The interval of a single prompt has no width.
        if mean.prompts > 1 and (mean.low > 0 or mean.high < 0):
            return f"{second} is {'better' if mean.value > 0 else 'worse'} than {first}: mean score {numbers}"
        return f"no difference between {first} and {second} can be told: mean score {numbers}"

    def plain(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        difference = {name: asdict(interval) for name, interval in self.summary.items()}
        return {"unpaired": self.unpaired, "difference": difference}


def compare(first: Results, second: Results) -> PolicyComparison:
    """Compare two policies prompt by prompt: second minus first.

    Raises:
        ConfigError: the files have no prompt in common, or no prompt with scored samples in both.
    """
    common = np.array([(row, second.prompts[key]) for key, row in first.prompts.items() if key in second.prompts])
    if not len(common):
        raise ConfigError(f"{first.path} and {second.path} have no prompt in common: sample the same data twice")
    before, after = _with_common_mean(first.measures), _with_common_mean(second.measures)
    differences = {name: after[name][common[:, 1]] - before[name][common[:, 0]] for name in after if name in before}
    summary = {name: bootstrap_mean(values) for name, values in differences.items() if not np.isnan(values).all()}
    if "mean" not in summary:
        raise ConfigError(f"{first.path} and {second.path} have no prompt in common whose samples were scored")
    return PolicyComparison(summary, len(first.prompts.keys() ^ second.prompts.keys()))


def plain_summary(summary: Summary) -> dict[str, dict[str, Any]]:
    """Return a summary as JSON values."""
    return {
        source: {name: asdict(interval) for name, interval in measures.items()} for source, measures in summary.items()
    }


def _with_all(sources: Sequence[str], measures: Mapping[str, np.ndarray]) -> Summary:
    summary = summarize_columns(sources, measures)
    return summary if len(summary) == 1 else {**summary, **summarize_columns([ALL] * len(sources), measures)}


def _with_common_mean(measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename mean@N to mean, because the mean of 8 samples estimates the same value as the mean of 4."""
    return {"mean" if name.startswith("mean@") else name: values for name, values in measures.items()}
