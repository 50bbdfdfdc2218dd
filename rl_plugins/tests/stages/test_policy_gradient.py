"""The gradient of an update equals a GRPO in one function, for any micro-batches and ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_plugins.algorithms.aggregation import AGGREGATIONS
from rl_plugins.algorithms.algorithm import Algorithm
from rl_plugins.algorithms.regularization import KLConfig
from rl_plugins.algorithms.rollout_correction import Rejection, RolloutCorrection
from rl_plugins.models.tiny import build_model, save_tiny_policy
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned

BUDGETS = [1, 40, 70, 10**6]


def plain_grpo(
    aggregation: str,
    scale: str = "group",
    kl: KLConfig | None = None,
    reference: Any = None,
    keeps: Callable[[Tensor], bool] = lambda log_probs_T: True,
) -> list[Tensor]:
    """The gradient of one on-policy update, sample by sample, without padding and without code of the stage.

    `keeps` returns False for the log-probs of a rejected response.
    """

    def log_probs(model: Any, prompt: str, response: str) -> Tensor:
        prompt_ids, ids = canned.tokenizer.encode(prompt), canned.tokenizer.encode(response)
        logits = model(torch.tensor([prompt_ids + ids])).logits[0] / canned.TEMPERATURE
        return logits.log_softmax(-1)[len(prompt_ids) - 1 : -1].gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)

    kl = kl or KLConfig()
    policy = canned.OwnPolicy().model
    groups: list[list[tuple[str, str, float]]] = []
    for prompt, responses in canned.RESPONSES.items():
        group = []
        for response in responses:
            reward = canned.score(response)
            if reward is None:
                continue
            if kl.placement == "reward" and response and reference is not None:
                with torch.no_grad():
                    drift = log_probs(policy, prompt, response) - log_probs(reference, prompt, response)
                reward -= kl.coefficient * float(drift.sum())
            group.append((prompt, response, reward))
        groups.append(group)
    losses: list[Tensor] = []
    num_sequences = 0
    for group in groups:
        rewards = [reward for _, _, reward in group]
        all_rewards = [reward for other in groups for _, _, reward in other]
        spread = statistics.stdev(rewards if scale == "group" else all_rewards)
        for prompt, response, reward in group:
            if response:
                num_sequences += 1
                current = log_probs(policy, prompt, response)
                if not keeps(current.detach()):
                    continue
                advantage = (reward - statistics.mean(rewards)) / (spread + 1e-6)
                loss = -advantage * (current - current.detach()).exp()
                if reference is not None and kl.placement == "loss":
                    u = log_probs(reference, prompt, response).detach() - current
                    loss = loss + kl.coefficient * (u.exp() - u - 1).clamp(max=10)
                losses.append(loss)
    if aggregation.startswith("token"):
        total = torch.cat(losses).mean() if aggregation == "token-mean" else torch.cat(losses).sum()
    else:
        sums = [loss.mean() if aggregation == "seq-mean-token-mean" else loss.sum() for loss in losses]
        total = torch.stack(sums).sum() / num_sequences / (canned.BUDGET if aggregation.endswith("norm") else 1)
    return list(torch.autograd.grad(total, list(policy.parameters())))


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max())


@cache
def whole_batch_gradients(case: str) -> tuple[list[list[Tensor]], dict[str, float]]:
    """Gradients and metrics of a case of `canned` on one rank, in one micro-batch without packing."""
    algorithm, updates = canned.algorithm_of(case)
    return canned.gradients(algorithm, updates_per_step=updates, packing=False)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_grpo_gradient_equals_the_definition_for_any_micro_batches(aggregation: str) -> None:
    expected = plain_grpo(aggregation)
    assert all(gradient.abs().max() > 0 for gradient in expected)
    algorithm = Algorithm(aggregation=aggregation, scale_factor=canned.BUDGET)
    seen = []
    for budget in BUDGETS:
        (gradient,), metrics = canned.gradients(algorithm, tokens_per_micro_batch=budget)
        assert_same(gradient, expected, 1e-6)
        seen.append((gradient, metrics))
    for gradient, metrics in seen[1:]:
        assert_same(gradient, seen[0][0], 1e-12)
        for name in ("train/loss", "train/entropy", "train/rollout_gap", "train/rollout_gap_max", "train/reward"):
            assert metrics[name] == pytest.approx(seen[0][1][name], rel=1e-6)


@pytest.mark.parametrize("recipe", canned.RECIPES)
def test_micro_batches_and_packing_do_not_change_the_gradients(recipe: str) -> None:
    expected, _ = whole_batch_gradients(recipe)
    assert all(any(gradient.abs().max() > 0 for gradient in gradients) for gradients in expected)
    algorithm, updates = canned.algorithm_of(recipe)
    actual, _ = canned.gradients(algorithm, updates_per_step=updates, tokens_per_micro_batch=40)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other, 1e-8)


def test_grpo_gradient_with_batch_scale_equals_the_definition() -> None:
    algorithm = Algorithm(advantage_options={"scale": "batch"})
    (gradient,), _ = canned.gradients(algorithm, tokens_per_micro_batch=40)
    assert_same(gradient, plain_grpo("token-mean", scale="batch"), 1e-6)


@pytest.mark.parametrize(
    "kl", [KLConfig(0.3, "loss", "k3"), KLConfig(0.3, "reward", "k1")], ids=lambda kl: kl.placement
)
def test_grpo_gradient_with_kl_to_a_reference_equals_the_definition(tmp_path: Path, kl: KLConfig) -> None:
    arguments = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2, "seed": 5}
    folder = save_tiny_policy(tmp_path, **arguments)
    expected = plain_grpo("token-mean", kl=kl, reference=build_model(**arguments).double())  # type: ignore[arg-type]
    (gradient,), metrics = canned.gradients(Algorithm(kl=kl), tokens_per_micro_batch=40, reference=str(folder))
    assert_same(gradient, expected, 1e-6)
    assert metrics["train/kl_coefficient"] == 0.3
    without = plain_grpo("token-mean")
    assert any(float((a - b).abs().max()) > 1e-3 for a, b in zip(gradient, without, strict=True))


def test_grpo_gradient_after_rejection_of_sequences_equals_the_definition() -> None:
    """Rejected sequences count in means over sequences, and rejected tokens do not count in means over tokens."""
    gaps: list[float] = []

    def gap(log_probs_T: Tensor) -> float:
        # The log-probs of the rollout engine are -1.
        gaps.append(-1 - float(log_probs_T.mean()))
        return gaps[-1]

    plain_grpo("token-sum", keeps=lambda log_probs_T: gap(log_probs_T) < math.inf)
    bound = statistics.median(gaps)
    correction = RolloutCorrection(rules=(Rejection("seq_mean_k1", (1e-9, math.exp(bound))),))
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        expected = plain_grpo(aggregation, keeps=lambda log_probs_T: gap(log_probs_T) < bound)
        algorithm = Algorithm(aggregation=aggregation, correction=correction)
        (gradient,), metrics = canned.gradients(algorithm, tokens_per_micro_batch=40)
        assert 0 < metrics["train/rollout/rejected"] < 1
        assert_same(gradient, expected, 1e-6)


def test_step_logs_rewards_lengths_failures_and_uniform_groups() -> None:
    _, metrics = canned.gradients(Algorithm(), tokens_per_micro_batch=40)
    responses = [r for group in canned.RESPONSES.values() for r in group]
    scores = [s for r in responses if (s := canned.score(r)) is not None]
    assert metrics["train/reward"] == pytest.approx(statistics.mean(scores))
    assert metrics["train/response_length"] == pytest.approx(statistics.mean(len(r) for r in responses))
    assert metrics["train/reward_raised"] == 1
    # The three of 4+4 score alike, and eleven samples are valid.
    assert metrics["train/uniform_groups"] == pytest.approx(3 / 11)
    assert metrics["train/ppo_kl"] == metrics["train/clip_fraction"] == metrics["train/truncated"] == 0


@pytest.mark.parametrize("case", canned.CASES)
def test_two_ranks_give_the_gradients_of_one_rank(case: str) -> None:
    algorithm, updates = canned.algorithm_of(case)
    expected, expected_metrics = whole_batch_gradients(case)
    beside = {"values_BT", "cost_values_BT", "process_rewards_BT"} & algorithm.needs
    assert len(expected) == updates * (1 + len(beside))
    names = ["train/loss", "train/reward", "train/entropy", "train/uniform_groups"]
    if "process_rewards_BT" in algorithm.needs:
        names += [f"train/process_reward_model/{name}" for name in ("loss", "accuracy", "return")]
    if algorithm.constraint is not None:
        names += ["train/cost", "train/cost_in_window", "train/lambda", "train/cost_critic/loss"]
    for (actual, metrics), _ in run_ranks(canned.rank_gradients, algorithm, updates):
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, 1e-6)
        for name in names:
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-6), name
