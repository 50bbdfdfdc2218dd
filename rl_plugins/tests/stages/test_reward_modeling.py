"""Reward modelling: the gradient equals its definition for any micro-batches and ranks, and a reward model learns."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from rl_plugins.config.models import OptimizerConfig
from rl_plugins.data.preferences import PairBatch
from rl_plugins.errors import ConfigError
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import save_tiny_policy
from rl_plugins.stages.reward_modeling import RewardModeling
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.ranks import run_ranks
from rl_plugins.tests.stages import canned, canned_labels

# All at once, one example at a time, and splits between: in two, and in more.
BUDGETS = [1, 60, 120, 10**6]


def plain_scores(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    scores: Tensor = model(torch.tensor([prompt + response])).logits[0, len(prompt) :, 0]
    return scores


def plain_bradley_terry(model: Any) -> tuple[Tensor, dict[str, float]]:
    """Pair by pair, without padding."""
    batch = canned_labels.batch_of("bradley_terry")
    losses, chosen_scores, rejected_scores = [], [], []
    for prompt, chosen, rejected, margin in zip(
        batch.prompt_ids, batch.chosen_ids, batch.rejected_ids, batch.margins, strict=True
    ):
        better, worse = plain_scores(model, prompt, chosen)[-1], plain_scores(model, prompt, rejected)[-1]
        losses.append(-nn.functional.logsigmoid(better - worse - margin) + 0.1 * (better + worse) ** 2)
        chosen_scores.append(float(better.detach()))
        rejected_scores.append(float(worse.detach()))
    differences = [a - b for a, b in zip(chosen_scores, rejected_scores, strict=True)]
    return torch.stack(losses).mean(), {
        "accuracy": statistics.mean(float(d > 0) for d in differences),
        "margin": statistics.mean(differences),
        "chosen_reward": statistics.mean(chosen_scores),
        "rejected_reward": statistics.mean(rejected_scores),
    }


def plain_process_reward(model: Any) -> tuple[Tensor, dict[str, float]]:
    """Label by label, without padding."""
    batch = canned_labels.batch_of("process_reward")
    losses, rewards, right = [], [], []
    for prompt, response, labels in zip(batch.prompt_ids, batch.response_ids, batch.labels, strict=True):
        for score, label in zip(plain_scores(model, prompt, response), labels, strict=True):
            if label == label:
                probability = score.sigmoid()
                losses.append(-label * probability.log() - (1 - label) * (1 - probability).log())
                rewards.append(float(probability.detach()))
                right.append(float((rewards[-1] > 0.5) == (label > 0.5)))
    assert len(losses) == 6
    return torch.stack(losses).mean(), {"reward": statistics.mean(rewards), "accuracy": statistics.mean(right)}


PLAIN = {"bradley_terry": plain_bradley_terry, "process_reward": plain_process_reward}


def assert_same(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert float((one - other).abs().max()) <= tolerance * float(other.abs().max()) + 1e-15


def definition(case: str) -> tuple[list[Tensor], dict[str, float]]:
    model = canned_labels.OwnRewardModel().model
    loss, metrics = PLAIN[case](model)
    gradient = torch.autograd.grad(loss, list(model.parameters()))
    return list(gradient), {"loss": float(loss.detach()), **metrics}


@pytest.mark.parametrize("case", list(PLAIN))
def test_reward_model_gradient_equals_the_definition_for_any_micro_batches(case: str) -> None:
    expected, plain_metrics = definition(case)
    # A bias adds the same to both scores: only centring changes with the bias.
    assert all(gradient.abs().max() > 0 for gradient in expected)
    seen = []
    for budget, packing in ((BUDGETS[0], False), *((budget, True) for budget in BUDGETS)):
        gradient, metrics = canned_labels.gradients(case, tokens_per_micro_batch=budget, packing=packing)
        assert_same(gradient, expected, 1e-6)
        for name, value in plain_metrics.items():
            assert metrics[f"train/{name}"] == pytest.approx(value, rel=1e-6), name
        seen.append(gradient)
    for gradient in seen[1:]:
        assert_same(gradient, seen[0], 1e-10)


@pytest.mark.parametrize("case", list(PLAIN))
@for_each("budget", [1, 10**6])
def test_reward_model_validation_averages_over_all_pairs_or_labels(case: str, budget: int) -> None:
    _, expected = definition(case)
    rows = canned_labels.batch_of(case).rows
    metrics = canned_labels.validation(case, [rows], tokens_per_micro_batch=budget)
    for name, value in expected.items():
        assert metrics[f"val/{name}"] == pytest.approx(value, rel=1e-6), name
    assert metrics["val/time/validate"] > 0


@pytest.mark.parametrize("packing", [True, False])
def test_both_responses_of_a_reward_model_pair_share_a_micro_batch(
    monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    sizes = []
    scores = RewardModeling._scores

    def counted(self: RewardModeling, samples: Any) -> Tensor:
        assert not torch.is_inference_mode_enabled()
        mask = samples.attention_mask
        # Packed, the responses of a pair share one pass of the prompt.
        once = int(mask.sum() - samples.prompt_lengths.sum() // 2)
        sizes.append((len(mask), once if packing else mask.numel()))
        return scores(self, samples)

    monkeypatch.setattr(RewardModeling, "_scores", counted)
    budget = 80 if packing else 120
    canned_labels.gradients("bradley_terry", tokens_per_micro_batch=budget, packing=packing)
    # More pairs fit without padding.
    assert len(sizes) == (2 if packing else 3) and all(rows % 2 == 0 and tokens <= budget for rows, tokens in sizes)
    assert sum(rows for rows, _ in sizes) == 2 * len(canned_labels.PAIRS)
    sizes.clear()
    canned_labels.validation("bradley_terry", [[0, 1, 2]], tokens_per_micro_batch=1, packing=packing)
    assert [rows for rows, _ in sizes] == [2, 2, 2]


def test_two_ranks_give_the_reward_model_gradients_and_validation_of_one_rank() -> None:
    of_ranks = run_ranks(canned_labels.rank_results)
    for case in PLAIN:
        expected, metrics = canned_labels.gradients(case)
        validated = canned_labels.validation(case, [canned_labels.UNEVEN[0]])
        for results, _ in of_ranks:
            (actual, actual_metrics), actual_validated = results[case]
            assert_same(actual, expected, 1e-6)
            for name in ("loss", "accuracy"):
                assert actual_metrics[f"train/{name}"] == pytest.approx(metrics[f"train/{name}"], rel=1e-6)
                assert actual_validated[f"val/{name}"] == pytest.approx(validated[f"val/{name}"], rel=1e-6)


def sums(count: int, seed: int) -> PairBatch:
    """Right sums of two digits against wrong ones."""
    generator = random.Random(seed)
    prompts, chosen, rejected = [], [], []
    for _ in range(count):
        left, right = generator.randrange(5), generator.randrange(5)
        wrong = (left + right + generator.randrange(1, 9)) % 10
        prompts.append(canned.tokenizer.encode(f"{left}+{right}="))
        chosen.append([*canned.tokenizer.encode(str(left + right)), canned.tokenizer.eos_token_id])
        rejected.append([*canned.tokenizer.encode(str(wrong)), canned.tokenizer.eos_token_id])
    return PairBatch(
        prompt_ids=prompts, chosen_ids=chosen, rejected_ids=rejected, margins=[0.0] * count, rows=list(range(count))
    )


def test_reward_model_learns_to_prefer_right_sums_and_export_can_be_loaded(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.2}
    path = str(save_tiny_policy(tmp_path / "policy", **sizes))
    stage = RewardModeling(path, optimizer=OptimizerConfig(lr=6e-3))
    metrics = canned.metrics_of(stage)
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy())
    held_out = canned.loader([sums(200, seed=1000)])
    trainer.validate(stage, held_out, verbose=False)
    # A new head scores 0: every pair is a tie.
    assert metrics["val/accuracy"] == metrics["val/margin"] == 0
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy())
    trainer.fit(stage, canned.loader([sums(64, seed) for seed in range(20)]))
    trainer.validate(stage, held_out, verbose=False)
    assert metrics["val/accuracy"] > 0.8, metrics
    assert metrics["val/margin"] > 0.5 and metrics["val/chosen_reward"] > metrics["val/rejected_reward"]
    stage.export(tmp_path / "exported")
    exported = load_scalar_head(str(tmp_path / "exported"), dtype=torch.float32, new_head=False)
    trained: Any = stage.reward_model
    weights = trained.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in exported.state_dict().items())


def test_zero_3_gives_the_reward_model_weights_and_metrics_of_a_single_device(tmp_path: Path) -> None:
    path = str(save_tiny_policy(tmp_path / "policy"))
    ((metrics, _),) = run_ranks(canned_labels.run_zero, path, tmp_path / "zero", world_size=1)
    expected = canned_labels.run(SingleDeviceRolloutStrategy(), path, tmp_path / "plain")
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert expected["val/margin"] > 0
    weights = [load_scalar_head(str(tmp_path / name), dtype=torch.float32).state_dict() for name in ("zero", "plain")]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-4, atol=1e-5)


def test_reward_modeling_refuses_a_loss_that_does_not_fit_the_data() -> None:
    stage = canned_labels.stage_of(canned_labels.OwnRewardModel(), "process_reward")
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(), precision="64-true")
    message = "process_reward_loss needs scores_BT, and a PairBatch has only chosen_scores_B, margins_B"
    with pytest.raises(ConfigError, match=message):
        trainer.fit(stage, canned.loader([canned_labels.batch_of("bradley_terry")]))


def test_reward_modeling_refuses_unknown_losses_and_options() -> None:
    with pytest.raises(ConfigError, match="loss='hinge' is unknown: use one of bradley_terry, process_reward"):
        canned_labels.stage_of(nn.Linear(1, 1), "bradley_terry", loss="hinge")
    with pytest.raises(ConfigError, match=r"loss_options do not fit the loss bradley_terry: .*'centring'"):
        canned_labels.stage_of(nn.Linear(1, 1), "bradley_terry", loss_options={"centring": 0.1})


def test_reward_modeling_refuses_a_model_for_sequence_classification(tmp_path: Path) -> None:
    path = save_tiny_policy(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    stage = RewardModeling(model, tokenizer=canned.tokenizer)
    with pytest.raises(
        ConfigError, match=r"Qwen2ForSequenceClassification scores the last token alone: save the model"
    ):
        canned.quiet_trainer(SingleDeviceRolloutStrategy()).fit(
            stage, canned.loader([canned_labels.batch_of("bradley_terry")])
        )


def test_reward_modeling_refuses_prompts_without_labels() -> None:
    stage = canned_labels.stage_of(canned_labels.OwnRewardModel(), "bradley_terry")
    trainer = canned.quiet_trainer(SingleDeviceRolloutStrategy(), precision="64-true")
    with pytest.raises(ConfigError, match=r"not from a PromptBatch: serve them with .*validate_on='responses'"):
        trainer.validate(stage, canned.loader([canned.prompt_batch(canned.PROMPTS)]), verbose=False)
