"""What is measured of each prompt's samples, and its summary by data source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

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
    names = dict.fromkeys(name for of_prompt in measures for name in of_prompt)
    return summarize_columns(
        sources, {name: np.array([of_prompt.get(name, math.nan) for of_prompt in measures]) for name in names}
    )


def summarize_columns(sources: Sequence[str], columns: Mapping[str, np.ndarray]) -> Summary:
    """`summarize` of measures that are given by name, one value per prompt; NaN is nothing known of a prompt."""
    summary: Summary = {}
    known, source_of = np.unique(sources, return_inverse=True)
    for number, source in enumerate(known):
        of_source = {name: values[source_of == number] for name, values in columns.items()}
        summary[str(source)] = {
            name: bootstrap_mean(values) for name, values in of_source.items() if not np.isnan(values).all()
        }
    return summary
