"""`Algorithm` combines its parts as the formulas say, and ignores values where the mask is 0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.advantages.group_relative import gdpo, grpo, rloo
from rl_plugins.algorithms.advantages.returns import reverse_kl
from rl_plugins.algorithms.aggregation import AGGREGATIONS, GlobalCounts, local_counts
from rl_plugins.algorithms.algorithm import Algorithm, LossModifiers
from rl_plugins.algorithms.constraint import CostConstraint
from rl_plugins.algorithms.filtering import GroupFilter, Resampling
from rl_plugins.algorithms.masked import rewards_of_tokens
from rl_plugins.algorithms.policy_losses.clipped import gmpo
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.algorithms.reward_shaping import RewardShaping
from rl_plugins.algorithms.rollout_correction import Rejection, RolloutCorrection, rejection_mask
from rl_plugins.errors import ConfigError
from rl_plugins.tests.algorithms.batches import Batch, make_batch
from rl_plugins.tests.algorithms.reference import basics as reference
from rl_plugins.tests.loops import for_each


def advantages(algorithm: Algorithm, batch: Batch, coefficient: float) -> tuple[Tensor, Tensor, Tensor]:
    inputs = {
        "scores_B": batch.scores,
        "response_mask_BT": batch.mask,
        "response_lengths_B": batch.lengths,
        "groups_B": batch.groups,
        "valid_B": batch.valid,
        "old_log_probs_BT": batch.old,
        "ref_log_probs_BT": batch.ref,
    }
    return algorithm.advantages(inputs, kl_coefficient=coefficient)


def loss_and_gradient(algorithm: Algorithm, batch: Batch, coefficient: float) -> tuple[float, Tensor, dict[str, Any]]:
    log_probs = batch.log_probs.clone().requires_grad_()
    inputs = {
        "log_probs_BT": log_probs,
        "old_log_probs_BT": batch.old,
        "advantages_BT": batch.advantages,
        "response_mask_BT": batch.mask,
        "ref_log_probs_BT": batch.ref,
    }
    counts = GlobalCounts(*local_counts(batch.mask).tolist())
    loss, metrics = algorithm.loss(inputs, kl_coefficient=coefficient, counts=counts)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient, metrics


@dataclass
class WithoutHash:
    """A loss as an object that compares by value."""

    def __call__(self, *, log_probs_BT: Tensor, advantages_BT: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -log_probs_BT * advantages_BT, {}


def test_algorithm_takes_an_object_without_a_hash_as_a_loss() -> None:
    assert Algorithm(policy_loss=WithoutHash(), correction="bypass_token_tis").policy_loss_function == WithoutHash()
    with pytest.raises(ConfigError, match=r"selection_options=.* selects no tokens"):
        Algorithm(policy_loss=WithoutHash(), selection_options={"share": 0.1})


@for_each("placement", ["loss", "reward"])
def test_algorithm_advantages_agree_with_plain_loops(placement: Any) -> None:
    algorithm = Algorithm(kl=KLConfig(coefficient=0.2, placement=placement))
    batch = make_batch(8)
    scores = batch.rewards() * batch.valid[:, None]
    expected_rewards = scores.numpy()
    if placement == "reward":
        old, ref = batch.old.numpy(), batch.ref.numpy()
        expected_rewards = reference.kl_in_reward(scores.numpy(), old, ref, batch.mask.numpy(), 0.25)
    expected = reference.grpo(expected_rewards, batch.mask.numpy(), batch.groups.numpy(), batch.valid.numpy(), "group")
    for version in (batch, batch.with_garbage()):
        # The coefficient comes from the controller and not from the configuration.
        rewards, actual, returns = advantages(algorithm, version, 0.25)
        np.testing.assert_allclose(rewards.numpy(), expected_rewards, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(returns, actual)


def test_rewards_of_turns_stay_on_learned_tokens_and_the_rest_goes_to_the_last() -> None:
    mask_BT = torch.tensor([[1.0, 1, 0, 1, 1, 0], [1, 1, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0], [1, 1, 0, 1, 1, 0]])
    # The third sample has a first turn whose last token is not learned, and the fourth failed.
    turns_BT = torch.tensor([[0, 0.5, 0, 0, 2, 0], [0, 0.5, 0, 0, 2, 0], [0.5, 0, 0, 2, 0, 0], [0, 0, 0, 0, 0, 0]])
    inputs = {
        "scores_B": torch.tensor([2.5, 1.0, 2.5, 0.0]),
        "token_level_scores_BT": turns_BT,
        "response_mask_BT": mask_BT,
        "response_lengths_B": torch.full((4,), 5),
        "groups_B": torch.zeros(4, dtype=torch.int64),
        "valid_B": torch.tensor([True, True, True, False]),
        "values_BT": torch.zeros(4, 6),
    }
    algorithm = Algorithm(advantage="gae", advantage_options={"normalize": False})
    rewards_BT, advantages_BT, _ = algorithm.advantages(inputs, kl_coefficient=0.0)
    # A shaped score differs from the sum of the rewards.
    expected = [[0, 0.5, 0, 0, 2, 0], [0, 0.5, 0, 0, 0.5, 0], [0.5, 0, 0, 2, 0, 0], [0.0] * 6]
    torch.testing.assert_close(rewards_BT, torch.tensor(expected))
    torch.testing.assert_close(advantages_BT[0], torch.tensor([2.5, 2.5, 0, 2, 2, 0]))
    torch.testing.assert_close(advantages_BT[2], torch.tensor([0, 2.0, 0, 2, 0, 0]))


def test_rewards_of_masked_tokens_go_to_learned_tokens_before_and_never_to_later_ones() -> None:
    """A turn of an older policy is masked, and the reward of a turn may be on a rejected token."""
    inputs = {
        "scores_B": torch.tensor([3.0, 3.0]),
        "token_level_scores_BT": torch.tensor([[0.0, 1, 0, 0, 2]] * 2),
        "response_mask_BT": torch.tensor([[0.0, 0, 0, 1, 1], [1, 0, 0, 1, 1]]),
        "response_lengths_B": torch.full((2,), 5),
        "groups_B": torch.zeros(2, dtype=torch.int64),
        "valid_B": torch.ones(2, dtype=torch.bool),
        "values_BT": torch.zeros(2, 5),
        "turns_BT": torch.tensor([[0, 0, 1, 1, 1]] * 2),
    }
    algorithm = Algorithm(advantage="gae", advantage_options={"normalize": False})
    rewards_BT, _, returns_BT = algorithm.advantages(inputs, kl_coefficient=0.0)
    assert rewards_BT.sum(dim=-1).tolist() == [3.0, 3.0]
    assert returns_BT.tolist() == [[0, 0, 0, 2, 2], [3, 0, 0, 2, 2]]
    # Both samples have the same outcome, and the group has no other reward of a first turn.
    _, advantages_BT, _ = Algorithm(advantage="mt_grpo").advantages(inputs, kl_coefficient=0.0)
    assert advantages_BT.tolist() == [[0.0] * 5] * 2


def test_rewards_of_tokens_give_the_rest_of_the_score_to_the_last_learned_token() -> None:
    scores_B, valid_B = torch.tensor([40.0, 40.0, 0.0]), torch.tensor([True, True, False])
    # The second sample has no learned token, and the third has no score.
    mask_BT = torch.tensor([[0.0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]])
    of_tokens_BT = torch.tensor([[1.0, 2, 4, 8, 16]] * 3)
    rewards_BT = rewards_of_tokens(scores_B, of_tokens_BT, mask_BT, valid_B)
    assert rewards_BT.tolist() == [[1, 6, 0, 33, 0], [40, 0, 0, 0, 0], [0] * 5] and rewards_BT.dtype == torch.float64
    assert rewards_of_tokens(scores_B, None, mask_BT, valid_B).tolist() == [[0, 0, 0, 40, 0], [40, 0, 0, 0, 0], [0] * 5]
    for nothing_BT in (None, of_tokens_BT[:, :0]):
        assert rewards_of_tokens(scores_B, nothing_BT, mask_BT[:, :0], valid_B).shape == (3, 0)


@for_each("advantage", ["grpo", "grpo_passk"])
def test_equal_scores_of_a_group_have_no_advantage_whatever_the_rewards_of_tokens(advantage: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.rand(8, 12, generator=generator) * (torch.rand(8, 12, generator=generator) < 0.5)
    inputs = {
        "scores_B": torch.full((8,), 10.3),
        "token_level_scores_BT": tokens_BT,
        "response_mask_BT": torch.ones(8, 12),
        "response_lengths_B": torch.full((8,), 12),
        "groups_B": torch.zeros(8, dtype=torch.int64),
        "valid_B": torch.ones(8, dtype=torch.bool),
    }
    rewards_BT, advantages_BT, _ = Algorithm(advantage=advantage).advantages(inputs, kl_coefficient=0.0)
    assert advantages_BT.abs().max() < 1e-6 and advantages_BT.dtype == rewards_BT.dtype == torch.float32


def test_algorithm_advantages_count_empty_responses_in_the_group() -> None:
    algorithm = Algorithm(advantage_options={"scale": "none"})

    def advantages_with(mask_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = {
            "groups_B": torch.tensor([0, 0]),
            "valid_B": torch.tensor([True, True]),
            "scores_B": torch.tensor([1.0, 4.0]),
            "response_mask_BT": mask_BT,
        }
        return algorithm.advantages(inputs, kl_coefficient=0.0)

    assert advantages_with(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))[1].tolist() == [[0.0, 0.0], [1.5, 1.5]]
    rewards, none, _ = advantages_with(torch.zeros(2, 0))
    assert rewards.shape == none.shape == (2, 0)


@for_each("mode", AGGREGATIONS)
@for_each("estimator", ["k1", "k2", "k3"])
def test_algorithm_loss_agrees_with_plain_loops_and_ignores_masked_positions(mode: str, estimator: str) -> None:
    algorithm = Algorithm(
        aggregation=mode,
        scale_factor=5.0,
        policy_loss_options={"clip_high": 0.28},
        kl=KLConfig(coefficient=0.2, estimator=estimator),
    )
    batch = make_batch(9)
    loss, gradient, metrics = loss_and_gradient(algorithm, batch, 0.3)
    expected = reference.ppo_clip(*batch.ppo_arrays(), 0.2, 0.28, 3.0)["loss"]
    kls = np.zeros_like(expected)
    for i, t in np.argwhere(batch.mask.numpy() > 0):
        kls[i, t] = reference.kl(estimator, float(batch.log_probs[i, t]), float(batch.ref[i, t]))
    # The metric is the mean of each sequence: the controller takes it.
    with np.errstate(invalid="ignore"):
        means = kls.sum(axis=1) / batch.mask.numpy().sum(axis=1)  # NaN for an empty response.
    np.testing.assert_allclose(metrics["kl"].numpy(), means, rtol=1e-9, atol=1e-9)
    expected += 0.3 * kls
    assert loss == pytest.approx(reference.aggregate(expected, batch.mask.numpy(), mode, 5.0), rel=1e-9)
    dirty_loss, dirty_gradient, _ = loss_and_gradient(algorithm, batch.with_garbage(), 0.3)
    assert dirty_loss == loss
    assert torch.equal(dirty_gradient, gradient)
    assert gradient.isfinite().all() and (gradient[batch.mask == 0] == 0).all() and gradient.any()


def test_algorithm_loss_measures_kl_and_leaves_out_kl_placed_in_the_reward() -> None:
    batch = make_batch(10)
    with_kl = Algorithm(kl=KLConfig(coefficient=0.2, placement="reward"))
    loss, _, metrics = loss_and_gradient(with_kl, batch, 0.2)
    assert "kl" in metrics
    assert loss == loss_and_gradient(with_kl, batch, 0.9)[0]


def test_algorithm_needs_follow_the_configuration() -> None:
    assert Algorithm().needs == frozenset()
    assert Algorithm(kl=KLConfig(coefficient=0.1)).needs == {"ref_log_probs_BT"}
    in_reward = Algorithm(kl=KLConfig(coefficient=0.1, placement="reward"))
    assert in_reward.needs == {"ref_log_probs_BT", "old_log_probs_BT"}
    assert Algorithm(advantage="gae").needs == {"values_BT"}
    assert Algorithm(policy_loss="kl_cov").needs == {"selected_BT", "old_log_probs_BT"}
    assert Algorithm(correction="token_tis").needs == {"old_log_probs_BT"}
    assert Algorithm(correction="bypass").needs == frozenset()


@for_each(
    ("options", "message"),
    [
        ({"advantage": "gae2"}, r"advantage='gae2' is unknown: use one of .*grpo"),
        ({"policy_loss": "x"}, r"policy_loss='x' is unknown: use one of .*ppo_clip"),
        ({"advantage": lambda *, wishes_B: None}, r"advantage needs wishes_B: set advantage_options\.wishes_B"),
        ({"policy_loss": "dro"}, r"policy_loss needs beta: set policy_loss_options\.beta"),
        ({"policy_loss": 3}, r"policy_loss=3: must be a name, a dotted path or a function"),
        ({"correction": "most"}, r"correction='most' is unknown: use one of none, token_tis"),
        ({"aggregation": "mean"}, r"aggregation='mean' is unknown"),
        (
            {"kl": KLConfig(estimator="k9")},
            r"kl\.estimator='k9' is unknown: use one of k1, k2, k3",
        ),
        ({"kl": KLConfig(placement="both")}, r"kl\.placement='both' is unknown"),  # type: ignore[arg-type]
        ({"aggregation": "seq-mean-token-sum-norm"}, r"needs scale_factor"),
        ({"correction": "bypass_token_tis"}, r"correction=bypass_token_tis: .*use correction=bypass.*reinforce"),
        (
            {"correction": "bypass_token_tis", "policy_loss": "rl_plugins.algorithms.policy_losses.clipped.ppo_clip"},
            r"correction=bypass_token_tis: .*use correction=bypass.*reinforce",
        ),
        ({"selection_options": {"share": 0.1}}, r"selection_options=.*: policy_loss=ppo_clip selects no tokens"),
        (
            {"policy_loss": "clip_cov", "selection_options": {"part": 0.1}},
            r"selection_options\.part is unknown: the options are share, low, high$",
        ),
        (
            {"policy_loss": "forward_kl_top_k", "constraint": CostConstraint("harm", 0.1)},
            r"policy_loss_options\.policy_weight=0 leaves rewards and costs out of the loss, so constraint",
        ),
        (
            {"resampling": Resampling(), "advantage": partial(grpo, scale="none")},
            r"resampling splits groups, and advantage=.*grpo.* compares",
        ),
        (
            {"advantage": partial(gdpo, eps=1e-4), "reward_components": ("a",), "shaping": RewardShaping(clip=(-1, 1))},
            r"advantage=gdpo compares reward_components alone, and shaping",
        ),
        (
            {"advantage": partial(reverse_kl, reward_weight=0.0), "shaping": RewardShaping(clip=(-1, 1))},
            r"advantage_options\.reward_weight=0 leaves the reward out of the loss, and shaping",
        ),
        (
            {"resampling": Resampling(), "group_filter": GroupFilter()},
            r"resampling splits the groups that",
        ),
        ({"resampling": Resampling()}, r"resampling splits groups, and advantage=grpo compares .*: use gae"),
        (
            {"resampling": Resampling(), "advantage": "reverse_kl", "advantage_options": {"reward_weight": 1.0}},
            r"resampling splits groups, and advantage_options.reward_weight compares",
        ),
        ({"resampling": Resampling(), "advantage": rloo}, r"resampling splits groups, and advantage=.*rloo.* compares"),
        (
            {"resampling": Resampling(), "advantage": "gae", "shaping": RewardShaping(length_factor=0.5)},
            r"resampling splits groups, and shaping\.length_factor compares",
        ),
        (
            {"resampling": Resampling(), "advantage": "gae", "policy_loss": "clip_cov"},
            r"resampling repeats samples, and policy_loss=clip_cov selects tokens",
        ),
        (
            {"advantage": "gdpo", "reward_components": ("a",), "shaping": RewardShaping(clip=(-1, 1))},
            r"advantage=gdpo compares reward_components alone, and shaping",
        ),
        (
            {"advantage": "gdpo", "reward_components": ("a",), "kl": KLConfig(0.1, "reward")},
            r"use kl\.placement=loss",
        ),
        (
            {"advantage": "reverse_kl", "shaping": RewardShaping(clip=(-1, 1))},
            r"advantage_options\.reward_weight=0 leaves the reward out of the loss, and shaping",
        ),
        (
            {"advantage": "reverse_kl", "advantage_options": {"reward_weight": 0.0}, "kl": KLConfig(0.1, "reward")},
            r"use kl\.placement=loss, leave shaping out, or set advantage_options\.reward_weight above 0",
        ),
        (
            {"policy_loss": "forward_kl_top_k", "shaping": RewardShaping(clip=(-1, 1))},
            r"policy_loss_options\.policy_weight=0 leaves the reward out of the loss, and shaping",
        ),
        (
            {
                "policy_loss": "forward_kl_top_k",
                "policy_loss_options": {"policy_weight": 0.0},
                "kl": KLConfig(0.1, "reward"),
            },
            r"use kl\.placement=loss, leave shaping out, or set policy_loss_options\.policy_weight above 0",
        ),
    ],
)
def test_algorithm_refuses_bad_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Algorithm(**options)


@for_each(
    "distillation",
    [
        {"advantage": "reverse_kl", "advantage_options": {"reward_weight": 0.5}},
        {"policy_loss": "forward_kl_top_k", "policy_loss_options": {"policy_weight": 0.5}},
    ],
)
def test_distillation_with_a_weight_for_the_reward_may_change_the_reward(distillation: dict[str, Any]) -> None:
    algorithm = Algorithm(**distillation, shaping=RewardShaping(clip=(-1, 1)), kl=KLConfig(0.1, "reward"))
    assert algorithm.kl_is_in_reward


@for_each("policy_loss", ["reinforce", "gpg"])
def test_algorithm_accepts_bypass_weights_for_losses_without_a_ratio(policy_loss: str) -> None:
    assert Algorithm(policy_loss=policy_loss, correction="bypass_token_tis").rollout_correction.level == "token"
    assert Algorithm(correction="bypass_geo_rs").rollout_correction.rules


# Rollout correction ---------------------------------------------------------------------------------------------


def corrected_gradient(algorithm: Algorithm, batch: Batch, rollout: Tensor) -> Tensor:
    """Gradient of the loss as the stage computes it, [B, T]; the policy is the policy before the update."""
    leaf = batch.old.clone().requires_grad_()
    inputs: dict[str, Any] = {
        "log_probs_BT": leaf,
        "old_log_probs_BT": rollout if algorithm.rollout_correction.bypass else batch.old,
        "rollout_log_probs_BT": rollout,
        "advantages_BT": batch.advantages,
        "response_mask_BT": batch.mask,
    }
    counts = local_counts(batch.mask)
    if algorithm.rollout_correction.decoupled:
        kept, weights = algorithm.rollout_correction.correct(
            log_probs_BT=batch.old, rollout_log_probs_BT=rollout, response_mask_BT=batch.mask
        )
        rejected = batch.mask.bool().any(dim=-1) & ~kept.bool().any(dim=-1)
        inputs |= {"response_mask_BT": kept, "rollout_weights_BT": weights}
        counts = local_counts(kept, rejected)
    inputs = dict(algorithm.corrected(inputs))
    loss, _ = algorithm.loss(inputs, kl_coefficient=0.0, counts=GlobalCounts(*counts.tolist()))
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


SEQUENCE_MEANS = ("seq-mean-token-sum", "seq-mean-token-mean")


@for_each("aggregation", SEQUENCE_MEANS)
@for_each("rule", [Rejection("token_k2", 0.02), Rejection("seq_mean_k2", 0.01)])
def test_rejection_has_the_same_means_over_sequences_with_and_without_bypass(rule: Rejection, aggregation: str) -> None:
    """The loss is linear in the log-probs, so only the denominators could differ."""
    batch, other = make_batch(3), make_batch(4)
    rollout = batch.old + 0.2 * other.advantages
    decoupled, bypass = (
        corrected_gradient(
            Algorithm(
                policy_loss="reinforce",
                aggregation=aggregation,
                correction=RolloutCorrection(rules=(rule,), bypass=bypass),
            ),
            batch,
            rollout,
        )
        for bypass in (False, True)
    )
    kept = rejection_mask(
        log_probs_BT=batch.old, rollout_log_probs_BT=rollout, response_mask_BT=batch.mask, rules=(rule,)
    )
    assert 0 < kept.sum() < batch.mask.sum() and not bypass[kept == 0].any()
    torch.testing.assert_close(bypass, decoupled)
    # The mean of a sequence is over the kept tokens; the mean over sequences counts rejected sequences, too.
    sequences = batch.mask.bool().any(dim=-1).sum()
    lengths = kept.sum(dim=-1, keepdim=True).clamp(min=1) if aggregation == "seq-mean-token-mean" else 1
    torch.testing.assert_close(bypass, -batch.advantages * kept / lengths / sequences)


def test_loss_gives_rollout_weights_to_a_policy_loss_that_takes_weights() -> None:
    batch = make_batch(5)
    weights = (0.3 * make_batch(6).advantages).exp() * batch.mask
    inputs: dict[str, Any] = {
        "log_probs_BT": batch.log_probs,
        "old_log_probs_BT": batch.old,
        "advantages_BT": batch.advantages,
        "response_mask_BT": batch.mask,
        "rollout_weights_BT": weights,
    }
    counts = GlobalCounts(*local_counts(batch.mask).tolist())
    loss, _ = Algorithm(policy_loss="gmpo", aggregation="token-sum").loss(inputs, kl_coefficient=0.0, counts=counts)
    expected, _ = gmpo(**inputs)
    torch.testing.assert_close(loss, expected.sum())


def test_top_entropy_leaves_the_gradient_of_gmpo_to_the_chosen_tokens() -> None:
    mask = torch.ones(1, 4)
    algorithm = Algorithm(
        policy_loss="gmpo", aggregation="seq-mean-token-mean", modifiers=LossModifiers(top_entropy=0.25)
    )
    gradients = {}
    for chosen in ([1.0, 0.0, 0.0, 0.0], [1.0] * 4):
        log_probs = torch.full((1, 4), -1.0, requires_grad=True)
        inputs: dict[str, Any] = {
            "log_probs_BT": log_probs,
            "old_log_probs_BT": log_probs.detach(),
            "advantages_BT": mask,
            "response_mask_BT": mask,
            "loss_mask_BT": torch.tensor([chosen]),
        }
        loss, _ = algorithm.loss(inputs, kl_coefficient=0.0, counts=GlobalCounts(*local_counts(mask).tolist()))
        (gradients[sum(chosen)],) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradients[1.0], torch.tensor([[-0.25, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(gradients[4.0], torch.full((1, 4), -0.25))
