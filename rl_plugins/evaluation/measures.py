"""Measures of several samples per prompt: answers, mean@N, best@k, maj@k and pass@k, with bootstrap intervals.

This module needs NumPy alone; validation during training and `rl-plugins evaluate` share it.

Shapes: N samples of one prompt, G prompts, A different answers, M subsets of k samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

from rl_plugins.data.boxed import last_box
from rl_plugins.data.final_number import MARKER, final_number, with_hyphens

_SUBSETS = 256
_RESAMPLES = 1000

# Answers ----------------------------------------------------------------------------------------------------------


def final_answer(response: str) -> str:
    r"""Return the answer in a response, for the vote of maj@k.

    The answer is the content of the last `\boxed{}`, also of a box which the end of the response cuts off, or else of
    the last box without braces (see `last_box`); without a box the final number (see `final_number`); without a number
    the text after the last `####`, or the whole text.
    """
    # A response may mention the command after the box: `I used \boxed`.
    box = last_box(response, braced=True) or last_box(response)
    if box is not None and box[0].strip():
        return with_hyphens("".join(box[0].split()))
    return final_number(response) or response.rpartition(MARKER)[2].strip()


# Estimators -------------------------------------------------------------------------------------------------------


def best_at(scores_N: Sequence[float], k: int) -> float:
    """Return the expected best score of k samples, an unbiased estimate from all subsets of k of the N samples.

    For scores of 0 and 1 this is pass@k.

    Args:
        scores_N: one score per sample.
        k: number of samples to draw, from 1 to N.
    """
    # The i-th smallest score is the best of all subsets of this sample and k - 1 of the i smaller scores.
    total = math.comb(len(scores_N), k)
    return float(sum(score * (math.comb(i, k - 1) / total) for i, score in enumerate(sorted(scores_N))))


def pass_at(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability of a right sample among k samples: the unbiased estimator `1 - C(n - c, k) / C(n, k)`.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    Args:
        num_samples: n, at least k.
        num_right: c, the number of right samples.
        k: number of samples to draw.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_at(scores_N: Sequence[float], answers_N: Sequence[str], k: int) -> float:
    """Return the expected score of the most frequent answer of k samples; answers with equal votes count equally.

    This is the mean over all subsets of k of the N samples, or over 256 random subsets (always the same) if there are
    more. The score of an answer is the mean score of its samples.

    Args:
        scores_N: one score per sample.
        answers_N: one answer per sample.
        k: number of samples to draw, from 1 to N.
    """
    _, answer_N = np.unique(np.asarray(answers_N, dtype=object).astype(str), return_inverse=True)
    votes_NA = np.eye(answer_N.max() + 1)[answer_N]
    subsets_Mk = _subsets(len(scores_N), k)
    votes_MA = votes_NA[subsets_Mk].sum(axis=1)
    scores_MA = (votes_NA * np.asarray(scores_N, dtype=float)[:, None])[subsets_Mk].sum(axis=1)
    wins_MA = votes_MA == votes_MA.max(axis=1, keepdims=True)
    score_MA = np.divide(scores_MA, votes_MA, out=np.zeros_like(scores_MA), where=wins_MA)
    return float((score_MA.sum(axis=1) / wins_MA.sum(axis=1)).mean())


@cache
def _subsets(size: int, k: int) -> np.ndarray:
    if math.comb(size, k) <= _SUBSETS:
        return np.array(list(combinations(range(size), k)))
    return np.random.default_rng(0).random((_SUBSETS, size)).argsort(axis=1)[:, :k]


# Intervals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % interval.

    Attributes:
        value: the mean.
        low: lower end of the interval.
        high: upper end of the interval.
        prompts: number of prompts.
    """

    value: float
    low: float
    high: float
    prompts: int


def bootstrap_mean(values_G: Sequence[float] | np.ndarray) -> Interval:
    """Return the mean, with the percentile interval of 1000 resamples of the prompts, always with the same seed.

    The unit of resampling is the prompt, because samples of one prompt are alike. To compare two policies, pass the
    difference of their values for each prompt.

    Args:
        values_G: one value per prompt, at least one; NaN (no value for this prompt) does not count.
    """
    values = np.asarray(values_G, dtype=float)
    values = values[~np.isnan(values)]
    random, size = np.random.default_rng(0), len(values)
    means = [values[random.integers(size, size=size)].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high), size)


# Measures of prompts ----------------------------------------------------------------------------------------------

Summary = dict[str, dict[str, Interval]]
"""Intervals by data source and measure."""


def sizes_up_to(num_samples: int) -> list[int]:
    """Return the values of k: 1, 2, 4, 8 and so on, and the number of samples."""
    powers = [1 << power for power in range(num_samples.bit_length()) if 1 << power < num_samples]
    return [*powers, num_samples]


def measure(
    scores_N: Sequence[float | None], answers_N: Sequence[str], sizes: Sequence[int], *, right_from: float | None = None
) -> dict[str, float]:
    """Return mean@N, best@k, maj@k and pass@k of one prompt.

    best@1 and maj@1 are left out, because both equal the mean. Samples with a failed reward do not count. If fewer than
    k samples are left, the measure is NaN.

    Args:
        scores_N: one score per sample; None if the reward failed.
        answers_N: one answer per sample.
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
            num_right = sum(score >= right_from or math.isclose(score, right_from) for score in scores)
            measures[f"pass@{k}"] = pass_at(len(scores), num_right, k) if enough else math.nan
    return measures


def summarize(sources: Sequence[str], measures: Sequence[Mapping[str, float]]) -> Summary:
    """Return the means over the prompts of each data source with their intervals.

    A measure without a value for any prompt of a data source is left out.

    Args:
        sources: data source of each prompt.
        measures: measures of each prompt, by name.
    """
    names = dict.fromkeys(name for prompt_measures in measures for name in prompt_measures)
    columns = {name: np.array([prompt_measures.get(name, math.nan) for prompt_measures in measures]) for name in names}
    return summarize_columns(sources, columns)


def summarize_columns(sources: Sequence[str], columns: Mapping[str, np.ndarray]) -> Summary:
    """Return the same as `summarize` for measures in columns.

    Args:
        sources: data source of each prompt.
        columns: float64 [G] under the name of each measure; NaN for a prompt without a value.
    """
    summary: Summary = {}
    names, source_of_prompt = np.unique(sources, return_inverse=True)
    for number, source in enumerate(names):
        source_columns = {name: values[source_of_prompt == number] for name, values in columns.items()}
        summary[str(source)] = {
            name: bootstrap_mean(values) for name, values in source_columns.items() if not np.isnan(values).all()
        }
    return summary
