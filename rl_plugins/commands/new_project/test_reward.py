"""Tests of the reward: python -m pytest test_reward.py."""

from reward import compute_score


def test_right_number_scores_more_than_digits_and_digits_more_than_text() -> None:
    """The order of the scores is the order in which the policy learns."""
    scores = [compute_score(response, ground_truth="42") for response in ("42", "41", "4x", "no", "")]
    assert scores == [1.0, 0.5, 0.25, 0.0, 0.0]
