"""The choice of pairs from samples, the update on the pairs, and steps without pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_plugins.algorithms.preference_losses import dpo
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError, DataError
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.stages.preference_examples import best_against_worst
from rl_plugins.stages.preference_optimization import OnlinePreferenceOptimization
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned, canned_preferences
from rl_plugins.tests.stages.test_preference_optimization import assert_same, plain_log_prob

# Of canned.RESPONSES: one response of 1+1 is empty, one of 12+30 fails, and the responses of 4+4 score alike.
BEST_AND_WORST = {"1+1": ("twenty-two", "2"), "12+30": ("forty", "42."), "100+1": ("a longer one", "z")}


def scored(scores: list[float], valid: list[bool], responses: list[list[int]] | None = None) -> Experience:
    count = len(scores)
    experience = Experience.from_samples(
        prompt_ids=[[1]] * count,
        responses=responses or [[10 + index] for index in range(count)],
        rollout_log_probs=[[0.0] * len(ids) for ids in responses] if responses else [[0.0]] * count,
        groups=[index // 3 for index in range(count)],
        policy_versions=0,
    )
    experience.scores, experience.valid = torch.tensor(scores), torch.tensor(valid)
    return experience


def pairs_of(experience: Experience) -> list[tuple[int, int, float]]:
    examples = best_against_worst(experience, 3)
    tokens = examples.samples.responses[:, 0]
    return [
        (int(tokens[best]) - 10, int(tokens[worst]) - 10, margin)
        for (best, worst), margin in zip(examples.members_NK.tolist(), examples.margins_N.tolist(), strict=True)
    ]


def test_best_against_worst_pairs_the_best_with_the_worst_of_each_group() -> None:
    everything = [True] * 6
    assert pairs_of(scored([0.0, 2.0, 1.0, -1.0, -3.0, -2.0], everything)) == [(1, 0, 2.0), (3, 4, 2.0)]
    # Of equal scores the first sample is taken.
    assert pairs_of(scored([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], everything)) == [(0, 1, 1.0), (5, 3, 1.0)]


def test_best_against_worst_skips_invalid_and_empty_samples_and_uniform_groups() -> None:
    scores, valid = [9.0, 2.0, 1.0, 5.0, 5.0, 5.0], [False, True, True, True, True, True]
    assert pairs_of(scored(scores, valid)) == [(1, 2, 1.0)]
    assert pairs_of(scored(scores[:3], [False, False, True])) == []
    assert pairs_of(scored(scores[:3], [False] * 3)) == []
    assert pairs_of(scored([0.0, 2.0, 1.0], [True] * 3, [[], [11], [12]])) == [(1, 2, 1.0)]
    assert pairs_of(scored(scores[:3], [True] * 3, [[10], [], []])) == []


@for_each("budget", [1, 70, 10**6])
def test_online_dpo_gradient_equals_the_definition_for_any_micro_batches(budget: int) -> None:
    options: dict[str, Any] = {"loss_options": {"beta": 0.7}, "tokens_per_micro_batch": budget}
    (gradient,), metrics = canned_preferences.online_gradients(canned.PROMPTS, **options)
    model = canned.OwnPolicy(canned_preferences.SEED).model
    reference = load_causal_lm(canned.other_model(), dtype=torch.float64)
    inputs: dict[str, Any] = {}
    for place, which in enumerate(("chosen", "rejected")):
        samples = [
            (canned_preferences.ids(prompt), canned_preferences.ids(pair[place]))
            for prompt, pair in BEST_AND_WORST.items()
        ]
        inputs[f"{which}_log_probs_N"] = torch.stack([plain_log_prob(model, *sample) for sample in samples])
        with torch.no_grad():
            ref_log_probs_N = torch.stack([plain_log_prob(reference, *sample) for sample in samples])
        inputs[f"ref_{which}_log_probs_N"] = ref_log_probs_N
    loss = dpo(**inputs, beta=0.7)[0].mean()
    assert_same(gradient, list(torch.autograd.grad(loss, list(model.parameters()))), 1e-9)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach())) and metrics["train/examples"] == 3
    # 3 of the 11 scored samples.
    assert metrics["train/uniform_groups"] == pytest.approx(3 / 11)
    assert metrics["train/reward_raised"] == 1


def test_step_without_pairs_keeps_the_policy_and_advances_the_clock() -> None:
    own = canned.OwnPolicy()
    before = {name: weight.clone() for name, weight in own.model.state_dict().items()}
    stage = canned_preferences.stage_of(own, OnlinePreferenceOptimization)
    batches = [canned.prompt_batch(["4+4"]), canned.prompt_batch(["4+4"])]
    metrics = canned_preferences.fit(stage, batches, 0, 1)
    assert stage.step == 2 and own.recorder.gradients == []
    assert all(torch.equal(weight, before[name]) for name, weight in own.model.state_dict().items())
    assert metrics["train/uniform_groups"] == 1 and metrics["train/examples"] == 0 and "train/loss" not in metrics


def test_update_without_pairs_is_skipped() -> None:
    # Prompts are dealt in order: the second update has 4+4 alone, whose samples score alike.
    gradients, metrics = canned_preferences.online_gradients(["1+1", "4+4"], updates_per_step=2)
    assert len(gradients) == 1 and metrics["train/examples"] == 1 and metrics["step"] == 1


def test_online_preference_optimization_refuses_wrong_options() -> None:
    one = SamplingConfig(max_tokens=20, num_samples=1)
    with pytest.raises(ConfigError, match=r"num_samples=1: a pair needs at least two responses"):
        canned_preferences.stage_of(canned.OwnPolicy(), OnlinePreferenceOptimization, sampling=one)
    with pytest.raises(DataError, match="updates_per_step=3 does not divide the 4 prompts of a rank"):
        canned_preferences.online_gradients(canned.PROMPTS, updates_per_step=3)
