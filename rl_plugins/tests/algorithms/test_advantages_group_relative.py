"""Group-relative advantages against examples computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.advantages import ADVANTAGES
from rl_plugins.algorithms.aggregation import GlobalCounts, aggregate, local_counts
from rl_plugins.algorithms.policy_losses import POLICY_LOSSES
from rl_plugins.tests.algorithms.simulated_ranks import run_on_ranks
from rl_plugins.tests.loops import for_each

ROOT_HALF = 0.5**0.5


def advantages(name: str, rewards: list[float], groups: list[int], mask: Any = None, **options: Any) -> Tensor:
    """One token per sample unless there is a mask; the score is on the last position."""
    mask = torch.ones(len(rewards), 1).double() if mask is None else torch.tensor(mask).double()
    token_level_rewards = torch.zeros_like(mask)
    token_level_rewards[:, -1] = torch.tensor(rewards)
    result, returns = ADVANTAGES[name](
        token_level_rewards_BT=token_level_rewards,
        response_mask_BT=mask,
        groups_B=torch.tensor(groups),
        valid_B=torch.ones(len(rewards), dtype=torch.bool),
        **options,
    )
    assert torch.equal(result, returns)
    return result


def test_grpo_passk_rewards_the_lead_of_the_best_sample() -> None:
    rewards, groups = [3.0, 5.0, 1.0, 2.0, 2.0, 0.0, 7.0], [0, 0, 0, 1, 1, 1, 2]
    plain = advantages("grpo_passk", rewards, groups, normalize=False)
    # 5 leads by 2; the best of the second group is shared; the third has no second best.
    assert plain[:, 0].tolist() == [0, 2, 0, 0, 0, 0, 0]
    normalized = advantages("grpo_passk", rewards, groups)  # The standard deviation of 3, 5, 1 is 2.
    assert normalized[:, 0].tolist() == pytest.approx([0, 1, 0, 0, 0, 0, 0], abs=1e-6)


def test_grpo_passk_accepts_negative_rewards() -> None:
    assert advantages("grpo_passk", [-3.0, -1.0], [0, 0], normalize=False)[:, 0].tolist() == [0, 2]


def test_rloo_subtracts_the_mean_of_the_other_samples() -> None:
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; a group of one sample keeps the reward.
    result = advantages("rloo", [1.0, 2.0, 6.0, 4.0], [0, 0, 0, 1])
    assert result[:, 0].tolist() == pytest.approx([-3, -1.5, 4.5, 4])


def test_opo_weights_the_baseline_by_response_length() -> None:
    # Lengths 1, 3: the baseline is (1 * 4 + 3 * 0) / 4 = 1. The third sample is alone, the group of the last is empty.
    mask = [[1, 0, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    result = advantages("opo", [4.0, 0.0, 2.0, 3.0, 1.0], [0, 0, 1, 2, 2], mask)
    assert result.tolist() == [[3, 0, 0], [-1, -1, -1], [2, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_opo_leaves_empty_responses_out_of_the_baseline() -> None:
    assert advantages("opo", [4.0, 100.0, 2.0], [0, 0, 0], [[1], [0], [1]])[:, 0].tolist() == [1, 0, -1]


def test_gpg_scales_by_the_share_of_nonzero_rewards() -> None:
    # Two of four samples have a reward: alpha = 2.
    result = advantages("gpg", [0.0, 1.0, 0.0, 3.0], [0, 0, 1, 1])
    assert result[:, 0].tolist() == pytest.approx([-1, 1, -3, 3])
    halved = advantages("gpg", [0.0, 1.0, 0.0, 3.0], [0, 0, 1, 1], norm=2.0)
    assert halved[:, 0].tolist() == pytest.approx([-0.5, 0.5, -1.5, 1.5])
    assert not advantages("gpg", [0.0, 0.0], [0, 0]).any()


def test_best_of_n_keeps_the_best_samples_of_each_group_above_the_threshold() -> None:
    rewards, groups = [1.0, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.25], [0, 0, 0, 0, 1, 1, 1, 2]
    kept = {
        (1, None): [1, 0, 0, 0, 1, 0, 0, 1],
        (2, None): [1, 0, 1, 0, 1, 1, 0, 1],
        (2, 0.0): [1, 0, 1, 0, 0, 0, 0, 1],
        (None, 0.25): [1, 0, 1, 1, 0, 0, 0, 0],
        (None, 9.0): [0] * 8,
    }
    for (keep, above), flags in kept.items():
        result = advantages("best_of_n", rewards, groups, keep=keep, above=above)[:, 0]
        assert result.tolist() == pytest.approx([flag * 8 / max(sum(flags), 1) for flag in flags])


def test_best_of_n_with_reinforce_has_the_loss_of_supervised_fine_tuning() -> None:
    mask = [[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]]
    kept_BT = advantages("best_of_n", [0.0, 1.0, 2.0, 0.0], [0, 0, 1, 1], mask)
    log_probs_BT = torch.arange(-12, 0).double().view(4, 3)
    mask_BT = torch.tensor(mask).double()
    loss_BT, _ = POLICY_LOSSES["reinforce"](
        log_probs_BT=log_probs_BT, old_log_probs_BT=log_probs_BT, advantages_BT=kept_BT, response_mask_BT=mask_BT
    )
    counts = GlobalCounts(*local_counts(mask_BT).tolist())
    assert aggregate(loss_BT, mask_BT, "token-mean", counts).item() == pytest.approx((9 + 6 + 5) / 3)


@for_each(
    ("options", "message"),
    [
        ({"keep": 0}, "keep=0: must be at least 1"),
        ({"keep": 1.5}, "keep=1.5: must be a whole number"),
        ({"above": float("nan")}, "above=nan: must be a finite number"),
        ({"keep": None}, "keep=null and above=null: every sample would be kept"),
    ],
)
def test_best_of_n_refuses_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages("best_of_n", [1.0, 0.0], [0, 0], **options)


def test_gpg_counts_nonzero_rewards_of_all_ranks() -> None:
    """Three of six samples have a reward, unevenly over two ranks: alpha = 2 on both."""
    rewards, groups = ([1.0, 3.0], [0.0, 2.0, 0.0, 0.0]), ([0, 0], [1, 1, 2, 2])

    def on_rank(rank: int, sum_over_ranks: Any, _: Any) -> list[float]:
        return advantages("gpg", rewards[rank], groups[rank], sum_over_ranks=sum_over_ranks)[:, 0].tolist()

    assert run_on_ranks(2, on_rank) == [[-2, 2], [-2, 2, 0, 0]]


def test_gpg_refuses_a_norm_of_zero() -> None:
    with pytest.raises(ValueError, match=r"norm=0\.0: use a positive number"):
        advantages("gpg", [0.0, 1.0], [0, 0], norm=0.0)


def test_max_rl_gives_rare_successes_larger_advantages() -> None:
    # Success rates 1/4 and 3/4: (1 - 1/4) / (1/4) = 3, and (1 - 3/4) / (3/4) = 1/3; a failure is always -1.
    rewards, groups = [1.0, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4
    result = advantages("max_rl", rewards, groups, eps=0.0)[:, 0].tolist()
    assert result == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1])


def test_max_rl_is_the_mean_over_successes_up_to_a_control_variate() -> None:
    """The paper's estimator: the sum over successes, divided by their number, up to a term of expectation 0."""
    rewards = [1.0, 0, 1, 0, 0, 0]
    result = advantages("max_rl", rewards, [0] * 6, eps=0.0)[:, 0]
    control = torch.full((6,), -1 / 6).double()
    torch.testing.assert_close(result / 6, torch.tensor(rewards).double() / 2 + control)


def test_max_rl_gives_zero_to_groups_without_success() -> None:
    assert not advantages("max_rl", [0.0, 0.0, -1.0, 0.5, 1.0], [0, 0, 1, 1, 2]).any()


def test_gdpo_normalizes_each_reward_component() -> None:
    """Rewards (0, 2), (1, 2) against (0, 1), (1, 0): the sums 2, 3, 1, 1 alone do not show the components."""
    components = torch.tensor([[0.0, 2.0], [1.0, 2.0], [0.0, 1.0], [1.0, 0.0]]).double()
    result = advantages("gdpo", [0.0] * 4, [0, 0, 1, 1], component_rewards_BK=components, weights=[1.0, 3.0])
    # Group-relative: first component -+ root(1/2) in both groups; second 0, 0 and +- root(1/2).
    totals = torch.tensor([-1.0, 1.0, -1 + 3, 1 - 3]).double() * ROOT_HALF
    expected = totals / totals.std()  # The mean is 0.
    torch.testing.assert_close(result[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_gdpo_whitens_over_tokens_and_not_over_samples() -> None:
    # GRPO gives +- root(1/2) on 3 tokens and 1 token: mean root(1/2)/2, unbiased variance 1/2.
    result = advantages("gdpo", [1.0, 0.0], [0, 0], [[1, 1, 1], [0, 0, 1]])
    expected = torch.tensor([[0.5, 0.5, 0.5], [0, 0, -1.5]]).double()
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_gdpo_refuses_weights_that_do_not_match_the_components() -> None:
    with pytest.raises(ValueError, match=r"weights=\[1\.0\]: give one for each of the 2 reward components"):
        advantages("gdpo", [0.0], [0], component_rewards_BK=torch.zeros(1, 2), weights=[1.0])
