"""Estimators against brute force over all subsets, and intervals against their coverage."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from statistics import fmean

import numpy as np
import pytest

from rl_plugins.evaluation.measures import (
    best_at,
    bootstrap_mean,
    final_answer,
    majority_at,
    measure,
    pass_at,
    sizes_up_to,
    summarize,
)
from rl_plugins.evaluation.results import PolicyComparison
from rl_plugins.tests.cases import case

SCORES = [0.5, -1.0, 2.0, 0.5, 0.0, 1.0]
ANSWERS = ["a", "b", "c", "a", "b", "b"]


def vote(indices: tuple[int, ...]) -> float:
    """The score of the majority's answer, ties shared."""
    votes = Counter(ANSWERS[i] for i in indices)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    return fmean(fmean(SCORES[i] for i in indices if ANSWERS[i] == winner) for winner in winners)


def test_best_at_and_majority_at_are_means_over_all_subsets():
    for k in range(1, 7):
        with case(f"{k=}"):
            subsets = list(combinations(range(6), k))
            assert best_at(SCORES, k) == pytest.approx(fmean(max(SCORES[i] for i in subset) for subset in subsets))
            assert majority_at(SCORES, ANSWERS, k) == pytest.approx(fmean(vote(subset) for subset in subsets))


def test_majority_at_of_many_samples_is_near_the_mean_over_all_subsets():
    scores, answers = SCORES * 4, ANSWERS * 4
    # Three of six samples say b, with a mean of 0; with more votes, b wins more often.
    assert majority_at(scores, answers, 1) == pytest.approx(fmean(SCORES))
    assert majority_at(scores, answers, 24) == pytest.approx(0.0)
    random = np.random.default_rng(1)
    orders = [random.permutation(24) for _ in range(40)]
    others = fmean(majority_at([scores[i] for i in order], [answers[i] for i in order], 5) for order in orders)
    assert majority_at(scores, answers, 5) == pytest.approx(others, abs=0.08)


def test_pass_at_and_best_at_of_known_values():
    for n, c, k, expected in [(10, 0, 5, 0.0), (10, 10, 1, 1.0), (5, 2, 1, 0.4), (5, 2, 2, 0.7), (5, 2, 4, 1.0)]:
        with case(f"{n=}, {c=}, {k=}"):
            assert pass_at(n, c, k) == pytest.approx(expected)
            assert best_at([1.0] * c + [0.0] * (n - c), k) == pytest.approx(expected)


def test_pass_at_counts_a_score_that_equals_the_bound_but_for_rounding():
    assert measure([0.7 + 0.2 + 0.1], ["a"], [1], right_from=1.0)["pass@1"] == 1.0
    assert measure([0.999], ["a"], [1], right_from=1.0)["pass@1"] == 0.0


def test_pass_at_equals_the_product_of_the_paper():
    # numpy's form in the paper, listing 1: 1 - prod(1 - k / arange(n - c + 1, n + 1)).
    assert pass_at(200, 13, 100) == pytest.approx(1 - np.prod(1 - 100 / np.arange(200 - 13 + 1, 201)))


def test_bootstrap_mean_interval_covers_the_mean_in_95_percent_of_cases():
    random = np.random.default_rng(3)
    intervals = [bootstrap_mean(random.binomial(1, 0.3, size=100).tolist()) for _ in range(200)]
    covered = fmean(interval.low <= 0.3 <= interval.high for interval in intervals)
    assert 0.89 <= covered <= 0.99
    width = fmean(interval.high - interval.low for interval in intervals)
    assert width == pytest.approx(2 * 1.96 * math.sqrt(0.3 * 0.7 / 100), rel=0.1)


def test_comparison_over_one_prompt_tells_no_difference():
    alone, two = (PolicyComparison({"mean": bootstrap_mean([1.0] * count)}, 0) for count in (1, 2))
    assert "no difference between a and b can be told" in alone.sentence("a", "b")
    assert two.sentence("a", "b").startswith("b is better than a")


def test_bootstrap_mean_of_one_prompt_and_with_unknown_values():
    one = bootstrap_mean([0.5, math.nan])
    assert (one.value, one.low, one.high, one.prompts) == (0.5, 0.5, 0.5, 1)
    assert bootstrap_mean([0.0, 1.0, 1.0]) == bootstrap_mean([0.0, 1.0, 1.0])


def test_measure_and_summarize_leave_out_failed_samples():
    measures = measure([1.0, None, 0.0, None], ["1", "2", "3", "4"], [1, 2, 4], right_from=1.0)
    assert measures["mean@4"] == 0.5 and measures["best@2"] == 1.0 and measures["pass@1"] == 0.5
    assert math.isnan(measures["best@4"]) and math.isnan(measures["maj@4"]) and math.isnan(measures["pass@4"])
    nothing = measure([None, None], ["1", "1"], [1, 2])
    assert all(math.isnan(value) for value in nothing.values()) and "pass@1" not in nothing
    summary = summarize(["x", "y"], [measures, nothing])
    assert set(summary["x"]) == {"mean@4", "pass@1", "best@2", "maj@2", "pass@2"}
    assert summary["y"] == {}


def test_sizes_up_to_doubles_and_ends_with_the_number_of_samples():
    assert [sizes_up_to(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{1} no, \boxed{\frac{1}{ 2}} it is 7", r"\frac{1}{2}"),
        (r"\boxed{3 and the end was cut", "3andtheendwascut"),
        (r"Of 5 and 7, $\boxed 2$ is right, and not 9", "2"),
        (r"It is \boxed {1,000}, and not 9", "1,000"),
        (r"The answer is \boxed{5}. I used the \boxed command.", "5"),
        (r"I write 12 in \boxed", "12"),
        ("4 and 5 are\n#### 1,234 apples of 9", "1234"),
        ("12 + 30 = -42.5", "-42.5"),
        ("it is −5", "-5"),
        ("it is\n#### −1,005", "-1005"),
        (r"it is \boxed{−5}", "-5"),
        ("the years 2023-2024", "2024"),
        ("x > -2, so +5", "5"),
        ("5 - .5 = +4.5, and half is -.5", "-0.5"),
        ("it costs .5", "0.5"),
        ("it costs 0018.00, or +18", "18"),
        ("it costs $18.50", "18.5"),
        ("it costs 12,345,600.00", "12345600"),
        ("it costs 1,00,000 rupees", "100000"),
        ("#### 1,00,000 rupees, and not 9", "100000"),
        ("#### 1,23", "123"),
        ("#### 12, 3", "12"),
        ("one of 4,1,2000", "2000"),
        ("one of 1,23", "23"),
        ("it is -0", "0"),
        ("it is\n#### -0.0", "0"),
        ("it is −.00", "0"),
        (" Paris \n", "Paris"),
        ("", ""),
    ],
)
def test_final_answer_of_boxes_marks_numbers_and_texts(response, answer):
    assert final_answer(response) == answer
