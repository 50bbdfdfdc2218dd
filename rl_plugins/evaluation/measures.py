"""What is measured of each prompt's samples, and its summary by data source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rl_plugins.evaluation.statistics import Interval, best_at, bootstrap_mean, majority_at, pass_at

Summary = dict[str, dict[str, Interval]]
"""Data source to measure to interval."""


def sizes_up_to(num_samples: int) -> list[int]:
    """1, 2, 4, 8 and so on, and the number of samples itself."""
    powers = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    return [*powers, num_samples]


def measure(
    scores_N: Sequence[float | None], answers_N: Sequence[str], sizes: Sequence[int], *, right_from: float | None = None
) -> dict[str, float]:
    """mean@N, best@k and maj@k (from k = 2 on: of one sample the mean says it all), and pass@k of one prompt.

    Samples whose reward failed take part in nothing: where fewer than k are left, the measure is NaN.

    Args:
        scores_N: one per sample; None where the reward failed.
        answers_N: the answer of each sample.
        sizes: the values of k.
        right_from: score from which a sample is right; None leaves pass@k out.
    """
    scored = [(score, answer) for score, answer in zip(scores_N, answers_N, strict=True) if score is not None]
    scores, answers = [score for score, _ in scored], [answer for _, answer in scored]
    measures = {f"mean@{len(scores_N)}": sum(scores) / len(scores) if scores else math.nan}
    for k in sizes:
        enough = len(scores) >= k
        if k > 1:
            measures[f"best@{k}"] = best_at(scores, k) if enough else math.nan
            measures[f"maj@{k}"] = majority_at(scores, answers, k) if enough else math.nan
        if right_from is not None:
            right = sum(score >= right_from for score in scores)
            measures[f"pass@{k}"] = pass_at(len(scores), right, k) if enough else math.nan
    return measures


def summarize(sources: Sequence[str], measures: Sequence[Mapping[str, float]]) -> Summary:
    """Means over the prompts of each data source, with their intervals; what no prompt has is left out.

    Args:
        sources: data source of each prompt.
        measures: those of each prompt.
    """
    by_source: dict[str, dict[str, list[float]]] = {}
    for source, of_prompt in zip(sources, measures, strict=True):
        columns = by_source.setdefault(source, {})
        for name, value in of_prompt.items():
            if not math.isnan(value):
                columns.setdefault(name, []).append(value)
    return {
        source: {name: bootstrap_mean(values) for name, values in columns.items()}
        for source, columns in sorted(by_source.items())
    }
