"""default_scorer turns a bare reward into an InlineScorer."""

from __future__ import annotations

import pytest

from rl_plugins.errors import ConfigError
from rl_plugins.rewards import InlineScorer, ScoringRequest
from rl_plugins.rewards.default import default_scorer

REQUEST = ScoringRequest(data_source="s", solution_str="42", ground_truth="42", extra_info={})


def right(solution_str, ground_truth):
    return float(solution_str == ground_truth)


class Right:
    def __init__(self, value=1.0):
        self.value = value

    def __call__(self, solution_str, ground_truth):
        return self.value * right(solution_str, ground_truth)


@pytest.mark.parametrize(
    ("reward", "value"),
    [
        (right, 1.0),
        (Right, 1.0),
        (Right(0.5), 0.5),
        ({"_target_": Right, "value": 2.0}, 2.0),
        ({"s": {"_target_": right}}, 1.0),
        ({"_target_": "rl_plugins.rewards.scorers.exact_match"}, 1.0),
    ],
)
def test_default_scorer_of_a_bare_reward_is_an_inline_scorer(reward, value):
    scorer = default_scorer(reward)
    assert isinstance(scorer, InlineScorer)
    assert [score.value for score in scorer.score([REQUEST])] == [value]


def test_default_scorer_names_a_function_with_unknown_arguments():
    def strange(answer):
        return 0.0

    with pytest.raises(ConfigError, match=r"strange.*'answer'"):
        default_scorer(strange)
