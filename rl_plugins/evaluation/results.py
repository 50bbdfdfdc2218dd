"""Scored samples: their measures by data source, and two policies compared prompt by prompt.

Files of samples stay on disk: in memory are a few rows, and a few numbers of each prompt.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.data.parquet import COLUMNS, PromptRows, Row, load_rows
from rl_plugins.errors import ConfigError
from rl_plugins.evaluation.generation import COLUMNS as SAMPLE_COLUMNS
from rl_plugins.evaluation.measures import Summary, measure, sizes_up_to, summarize_columns
from rl_plugins.evaluation.statistics import Interval, bootstrap_mean
from rl_plugins.rewards.failures import check_failure_rate, failure_counts
from rl_plugins.rewards.records import Score, ScoringRequest

ALL = "all"
"""The data source of all prompts together."""

_CHUNK = 256


@dataclass(frozen=True)
class Samples:
    """A file of samples, which stays on disk.

    Attributes:
        path: of the file.
        rows: a prompt in each, with the lists of its samples.
        size: samples of each prompt.
        sources: the data sources of the prompts.
    """

    path: Path
    rows: PromptRows
    size: int
    sources: frozenset[str]


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
        prompts: number of each prompt, by a digest of what identifies it.
        measures: by name one value for each prompt; NaN where its rewards failed.
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


def load_samples(path: Path) -> Samples:
    """A file that `generate` made, or one with the same columns.

    Raises:
        ConfigError: a column is missing, a row is malformed, or rows have different numbers of responses.
    """
    rows = load_rows(path, (*COLUMNS, *SAMPLE_COLUMNS))
    size, sources = len(rows.rows[0]["responses"] or ()), set()
    for number, row in enumerate(rows):
        if not size or any(len(row[name] or ()) != size for name in SAMPLE_COLUMNS):
            raise ConfigError(f"{path}, row {number}: every row must have as many responses as the first, {size}")
        sources.add(row["data_source"])
    return Samples(path, rows, size, frozenset(sources))


def evaluate(
    samples: Samples,
    score: Callable[[Sequence[ScoringRequest]], Sequence[Score]],
    answer_of: Callable[[str], str],
    *,
    right_from: float,
    max_failure_rate: float,
) -> Results:
    """Score a few rows at a time, measure every prompt and sum up.

    Args:
        samples: what is scored.
        score: a scorer's.
        answer_of: the answer in a response, for the vote.
        right_from: score from which a sample is right.
        max_failure_rate: share of all samples whose reward may fail.

    Raises:
        RewardFailureError: more failed; raised once that is certain.
    """
    size, total = samples.size, samples.size * len(samples.rows)
    prompts, sources, repeats = dict[bytes, int](), list[str](), Counter[bytes]()
    values, names = array("d"), list[str]()
    failed, examples = list[Score](), dict[str, Score]()
    reasons, tokens = Counter[str](), 0
    for rows in samples.rows.chunks(_CHUNK):
        scores = score(_requests(rows))
        # One message of each kind is enough.
        failed += [examples.setdefault(one.failure, one) for one in scores if one.failure is not None]
        check_failure_rate(failed, max_failure_rate, total)
        for number, row in enumerate(rows):
            of_row = [one.value for one in scores[number * size : (number + 1) * size]]
            answers = [str(answer_of(response)) for response in row["responses"]]
            measures = measure(of_row, answers, sizes_up_to(size), right_from=right_from)
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


def _requests(rows: Sequence[Row]) -> list[ScoringRequest]:
    """What is scored: each response of each row."""
    return [
        ScoringRequest(
            row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"], row["prompt"]
        )
        for row in rows
        for response in row["responses"]
    ]


def _identity(row: Row, known: Mapping[bytes, int], repeats: Counter[bytes]) -> bytes:
    """A digest of the source, the messages and the ground truth, and of how often they stood there before."""
    content = json.dumps([row["data_source"], row["prompt"], row["reward_model"]["ground_truth"]], default=str)
    identity = blake2b(content.encode(), digest_size=16).digest()
    if identity not in known:
        return identity
    repeats[identity] += 1
    return identity + repeats[identity].to_bytes(8, "little")


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
    common = np.array([(row, second.prompts[key]) for key, row in first.prompts.items() if key in second.prompts])
    if not len(common):
        raise ConfigError(f"{first.path} and {second.path} have no prompt in common: sample the same data twice")
    before, after = _means_named_alike(first.measures), _means_named_alike(second.measures)
    differences = {name: after[name][common[:, 1]] - before[name][common[:, 0]] for name in after if name in before}
    summary = {name: bootstrap_mean(values) for name, values in differences.items() if not np.isnan(values).all()}
    if "mean" not in summary:
        raise ConfigError(f"{first.path} and {second.path} have no prompt in common whose samples were scored")
    return Comparison(summary, len(first.prompts.keys() ^ second.prompts.keys()))


def plain_summary(summary: Summary) -> dict[str, dict[str, Any]]:
    """As JSON takes it."""
    return {source: {name: asdict(of) for name, of in measures.items()} for source, measures in summary.items()}


def _with_all(sources: Sequence[str], measures: Mapping[str, np.ndarray]) -> Summary:
    summary = summarize_columns(sources, measures)
    return summary if len(summary) == 1 else {**summary, **summarize_columns([ALL] * len(sources), measures)}


def _means_named_alike(measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The mean of 8 samples estimates the same as the mean of 4."""
    return {"mean" if name.startswith("mean@") else name: values for name, values in measures.items()}
