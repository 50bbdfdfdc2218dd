"""Estimators from several samples to one prompt, and bootstrap intervals over prompts. NumPy alone.

Shapes: N samples of one prompt, G prompts, A different answers, M subsets of k samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np

_SUBSETS = 256
_RESAMPLES = 1000


def best_at(scores_N: Sequence[float], k: int) -> float:
    """Expected best score of k samples: unbiased, from all subsets of k of the N samples at once.

    Of scores 0 and 1 this is pass@k.

    Args:
        scores_N: one score per sample.
        k: samples drawn, from 1 to N.
    """
    # The i-th smallest is the best of the subsets that take it and k - 1 of the i smaller ones.
    total = math.comb(len(scores_N), k)
    return float(sum(score * (math.comb(i, k - 1) / total) for i, score in enumerate(sorted(scores_N))))


def pass_at(num_samples: int, num_right: int, k: int) -> float:
    """Probability that one of k samples is right: the unbiased estimator `1 - C(n - c, k) / C(n, k)`.

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1.

    Args:
        num_samples: n, at least k.
        num_right: c, how many of them are right.
        k: samples drawn.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_at(scores_N: Sequence[float], answers_N: Sequence[str], k: int) -> float:
    """Expected score of the answer that most of k samples give; answers that tie count equally.

    The mean over all subsets of k of the N samples, or over 256 random ones (always the same) where there are more. An
    answer's score is the mean score of its samples.

    Args:
        scores_N: one score per sample.
        answers_N: the answer of each sample.
        k: samples that vote, from 1 to N.
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


@dataclass(frozen=True)
class Interval:
    """A mean over prompts and its 95 % interval.

    Attributes:
        value: the mean.
        low: lower end of the interval.
        high: upper end.
        prompts: how many there are.
    """

    value: float
    low: float
    high: float
    prompts: int


def bootstrap_mean(values_G: Sequence[float] | np.ndarray, *, seed: int = 0) -> Interval:
    """The mean, with the percentile interval of 1000 resamples of the prompts.

    Prompts are resampled, not samples: those of one prompt are alike. The difference of two policies gets its interval
    from the differences prompt by prompt.

    Args:
        values_G: one value per prompt, at least one; NaN (nothing known of this prompt) does not count.
        seed: of the resamples.
    """
    values = np.asarray(values_G, dtype=float)
    values = values[~np.isnan(values)]
    random, size = np.random.default_rng(seed), len(values)
    means = [values[random.integers(size, size=size)].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high), size)
