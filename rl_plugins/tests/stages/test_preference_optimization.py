"""Preference optimization: the gradient equals its definition for any micro-batches and ranks, and a policy learns."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_plugins.algorithms.inputs import call_with
from rl_plugins.algorithms.preference_losses import PREFERENCE_LOSSES, dpo
from rl_plugins.config.models import OptimizerConfig
from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.data.preferences import PairBatch
from rl_plugins.errors import ConfigError
from rl_plugins.models.loading import load_causal_lm
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.rollout.transformers_engine import TransformersRollout
from rl_plugins.stages.preference_learner import PreferenceLearner
from rl_plugins.stages.preference_optimization import PreferenceOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned, canned_preferences

# All at once, one example at a time, and splits between.
BUDGETS = [1, 60, 120, 10**6]


def plain_log_prob(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """Log-prob of one response, without padding."""
    log_probs = model(torch.tensor([prompt + response])).logits[0, :-1].log_softmax(dim=-1)
    return sum(
        (log_probs[len(prompt) - 1 + t, token] for t, token in enumerate(response)),
        torch.zeros((), dtype=torch.float64),
    )


def plain_loss(case: str, model: Any, reference: Any) -> tuple[Tensor, dict[str, float]]:
    """Pair by pair, or response by response."""
    name, options, pairs = canned_preferences.CASES[case]
    batch = canned_preferences.batch_of(pairs, canned_preferences.EVERYTHING)
    if name == "kto":
        return plain_kto(batch, options, model, reference)
    losses, of_pairs = [], []
    assert isinstance(batch, PairBatch)
    for prompt, chosen, rejected in zip(batch.prompt_ids, batch.chosen_ids, batch.rejected_ids, strict=True):
        inputs: dict[str, Any] = {}
        for which, response in (("chosen", chosen), ("rejected", rejected)):
            inputs[f"{which}_log_probs_N"] = plain_log_prob(model, prompt, response)[None]
            inputs[f"ref_{which}_log_probs_N"] = plain_log_prob(reference, prompt, response)[None].detach()
            inputs[f"{which}_lengths_N"] = torch.tensor([float(len(response))], dtype=torch.float64)
        loss_N, metrics = call_with(PREFERENCE_LOSSES[name], inputs, options)
        losses.append(loss_N[0])
        of_pairs.append({key: float(value[0]) for key, value in metrics.items()})
    return torch.stack(losses).mean(), {key: statistics.mean(row[key] for row in of_pairs) for key in of_pairs[0]}


def plain_kto(batch: Any, options: dict[str, Any], model: Any, reference: Any) -> tuple[Tensor, dict[str, float]]:
    if isinstance(batch, PairBatch):
        prompts, responses = batch.prompt_ids * 2, batch.chosen_ids + batch.rejected_ids
        labels = [True] * len(batch) + [False] * len(batch)
    else:
        # Desirable responses first, then the rest, in the order of rows.
        order = sorted(range(len(batch)), key=lambda i: (not batch.labels[i], batch.rows[i]))
        prompts, responses, labels = (
            [column[i] for i in order] for column in (batch.prompt_ids, batch.response_ids, batch.labels)
        )
    with torch.no_grad():
        gaps = [
            float(plain_log_prob(model, prompt, response) - plain_log_prob(reference, prompt, response))
            for prompt, response in zip(prompts, [*responses[1:], responses[0]], strict=True)
        ]
    point = max(0.0, statistics.mean(gaps))
    assert point > 0.1, "a reference point of 0 is the bound of max"
    losses, rewards = [], []
    for prompt, response, good in zip(prompts, responses, labels, strict=True):
        ratio = plain_log_prob(model, prompt, response) - plain_log_prob(reference, prompt, response).detach()
        gain = ratio - point if good else point - ratio
        weight = options.get("desirable_weight" if good else "undesirable_weight", 1.0)
        losses.append(weight * (1 - (options["beta"] * gain).sigmoid()))
        rewards.append(options["beta"] * float(ratio.detach()))
    good_rewards = [reward for reward, good in zip(rewards, labels, strict=True) if good]
    bad_rewards = [reward for reward, good in zip(rewards, labels, strict=True) if not good]
    chosen, rejected = statistics.mean(good_rewards), statistics.mean(bad_rewards)
    metrics = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": chosen - rejected,
        "reference_point": point,
    }
    return torch.stack(losses).mean(), metrics


def other_model() -> Any:
    return load_causal_lm(canned.other_model(), dtype=torch.float64)


def definition(case: str) -> tuple[list[Tensor], dict[str, float]]:
    model = canned.OwnPolicy(canned_preferences.SEED).model
    loss, metrics = plain_loss(case, model, other_model())
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return list(gradient), {"loss": float(loss.detach()), **metrics}


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    scale = max(float(tensor.abs().max()) for tensor in expected)
    for one, other in zip(actual, expected, strict=True):
        assert float((one - other).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("case", list(canned_preferences.CASES))
def test_preference_gradient_equals_the_definition_for_any_micro_batches(case: str) -> None:
    expected, plain_metrics = definition(case)
    for budget, packing in ((BUDGETS[0], False), *((budget, True) for budget in BUDGETS)):
        (gradient,), metrics = canned_preferences.gradients(case, tokens_per_micro_batch=budget, packing=packing)
        assert_same(gradient, expected, 1e-9)
        for name, value in plain_metrics.items():
            assert metrics[f"train/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert {"train/accuracy", "train/margin", "train/chosen_reward", "train/rejected_reward"} <= metrics.keys()


@pytest.mark.parametrize("packing", [True, False])
def test_both_responses_of_a_preference_pair_share_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    sizes = []
    log_probs = PreferenceLearner._log_probs

    def counted(self: PreferenceLearner, name: str, samples: Any) -> Tensor:
        if torch.is_grad_enabled():
            mask = samples.trimmed().attention_mask
            # Packed, the responses of a pair share one pass of the prompt.
            once = int(mask.sum() - samples.prompt_lengths.sum() // 2)
            sizes.append((len(mask), once if packing else mask.numel()))
            assert samples.groups[: len(samples) // 2].equal(samples.groups[len(samples) // 2 :])
        return log_probs(self, name, samples)

    monkeypatch.setattr(PreferenceLearner, "_log_probs", counted)
    budget = 80 if packing else 120
    canned_preferences.gradients("dpo", tokens_per_micro_batch=budget, packing=packing)
    # More pairs fit without padding.
    assert len(sizes) >= (2 if packing else 3) and all(rows % 2 == 0 and tokens <= budget for rows, tokens in sizes)
    assert sum(rows for rows, _ in sizes) == 2 * len(canned_preferences.PAIRS)


def test_reference_is_loaded_only_for_losses_that_need_a_reference() -> None:
    for loss, engines in (("dpo", {"policy", "reference"}), ("orpo", {"policy"})):
        stage = canned_preferences.stage_of(canned.OwnPolicy(), loss=loss)
        batch = canned_preferences.batch_of(True, [0, 1])
        metrics = canned_preferences.fit(stage, [batch], 0, 1)
        assert set(stage.named_models()) == engines
        assert ("train/time/ref_log_probs" in metrics or "time/ref_log_probs" in metrics) == (loss == "dpo")
        before = other_model().state_dict()
        if loss == "dpo":
            assert all(torch.equal(value, before[name]) for name, value in stage.reference.state_dict().items())


def test_kto_trains_in_a_step_of_good_or_of_bad_responses_alone() -> None:
    for rows, name in (([0, 2], "train/chosen_reward"), ([1, 3], "train/rejected_reward")):
        stage = canned_preferences.stage_of(canned.OwnPolicy(), loss="kto")
        metrics = canned_preferences.fit(stage, [canned_preferences.batch_of(False, rows)], 0, 1)
        assert {"train/chosen_reward", "train/rejected_reward", "train/margin"} & metrics.keys() == {name}


def test_custom_loss_gets_the_arguments_that_the_loss_names() -> None:
    seen = {}

    def custom_loss(*, chosen_log_probs_N: Tensor, margins_N: Tensor, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        seen["margins"] = margins_N.tolist()
        return -scale * chosen_log_probs_N, {"margin": margins_N}

    stage = canned_preferences.stage_of(
        canned.OwnPolicy(), loss=custom_loss, loss_options={"scale": 2.0}, reference=None
    )
    metrics = canned_preferences.fit(stage, [canned_preferences.batch_of(True, [1, 2])], 0, 1)
    assert sorted(seen["margins"]) == [0.25, 1.5] and metrics["train/margin"] == pytest.approx(0.875)


def test_two_ranks_give_the_preference_gradients_of_one_rank() -> None:
    of_ranks = run_ranks(canned_preferences.rank_results)
    one_rank = {case: canned_preferences.gradients(case) for case in canned_preferences.ON_TWO_RANKS}
    for case, (prompts, options) in canned_preferences.ONLINE.items():
        one_rank[f"online {case}"] = canned_preferences.online_gradients(prompts, **options)
    for case, (expected, metrics) in one_rank.items():
        for results, _ in of_ranks:
            actual, actual_metrics = results[case]
            assert len(actual) == len(expected)
            for one, other in zip(actual, expected, strict=True):
                assert_same(one, other, 1e-9)
            assert actual_metrics.keys() == metrics.keys()
            for name, value in metrics.items():
                if name.startswith("train/") or name == "step":
                    assert actual_metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), (case, name)
    for case in canned_preferences.VALIDATED:
        for results, _ in of_ranks:
            assert_validated(results[f"validated {case}"], case)


def assert_validated(metrics: dict[str, float], case: str) -> None:
    _, expected = definition(case)
    assert {name: metrics[f"val/{name}"] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-9), case
    assert not [name for name in metrics if name.startswith(("train/", "val/train/"))]


@for_each("case", canned_preferences.VALIDATED)
def test_validation_on_responses_measures_the_loss_by_the_definition(case: str) -> None:
    assert_validated(canned_preferences.validate(case, canned_preferences.EVERYTHING), case)


def few_pairs() -> PairBatch:
    return canned_preferences.batch_of(True, canned_preferences.EVERYTHING)  # type: ignore[return-value]


def test_dpo_raises_the_margin_of_six_pairs_and_validates_by_generation(tmp_path: Path) -> None:
    path = str(save_tiny_policy(tmp_path / "policy"))
    seen: list[dict[str, float]] = []

    class Recording(PreferenceOptimization):
        def end_step(self, metrics: Any) -> None:
            seen.append(dict(metrics))
            super().end_step(metrics)

    stage = Recording(
        path,
        scorer=canned.CannedScorer(),
        eval_sampling=SamplingConfig(max_tokens=4, temperature=0.0),
        optimizer=OptimizerConfig(lr=2e-3),
        tokens_per_micro_batch=200,
    )
    metrics = canned.metrics_of(stage)
    rollout = TransformersRollout(path)
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(rollout=rollout), check_val_every_n_epoch=1)
    trainer.fit(stage, canned.loader([few_pairs()] * 15), canned.loader([canned.prompt_batch(canned.PROMPTS)]))
    # The policy starts as the reference: every pair is a tie, but for rounding.
    assert seen[0]["train/margin"] == pytest.approx(0, abs=1e-5)
    assert seen[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert seen[-1]["train/margin"] > 0.5 and seen[-1]["train/accuracy"] == 1 and seen[-1]["train/loss"] < 0.5
    assert "val/reward" in metrics and len(stage.shown_samples.validation) == len(canned.PROMPTS)


def test_preference_optimization_refuses_wrong_losses_options_and_data() -> None:
    def stage(**options: Any) -> PreferenceOptimization:
        made: PreferenceOptimization = canned_preferences.stage_of(nn.Linear(1, 1), **options)
        return made

    with pytest.raises(ConfigError, match="loss='hinge' is unknown: use one of dpo, ipo, rpo, kto, orpo, simpo"):
        stage(loss="hinge")
    with pytest.raises(ConfigError, match=r"loss_options do not fit the loss dpo: .*'bata'"):
        stage(loss_options={"bata": 0.1})
    with pytest.raises(ConfigError, match="the loss dpo needs log-probs under a reference: name the model"):
        stage(reference=None)

    def odd(*, chosen_log_probs_N: Tensor, desirable_N: Tensor) -> Any:
        raise NotImplementedError

    with pytest.raises(ConfigError, match="the loss odd needs chosen_log_probs_N, desirable_N: pairs have"):
        stage(loss=odd)
    assert stage(loss=dpo).objective.takes_pairs
    unpaired = canned_preferences.batch_of(False, [0, 1])
    with pytest.raises(ConfigError, match="the loss dpo takes pairs, and the data has single responses with labels"):
        canned_preferences.fit(canned_preferences.stage_of(canned.OwnPolicy()), [unpaired], 0, 1)
