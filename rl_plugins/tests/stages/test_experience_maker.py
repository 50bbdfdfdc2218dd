"""Inputs computed by the stage for an algorithm or an option, and their use in the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from rl_plugins.algorithms.algorithm import Algorithm, LossModifiers
from rl_plugins.algorithms.filtering import GroupFilter
from rl_plugins.algorithms.regularization import EntropyConfig, KLConfig
from rl_plugins.algorithms.reward_shaping import OverlongPenalty, RewardShaping
from rl_plugins.algorithms.rollout_correction import RolloutCorrection
from rl_plugins.callbacks.averages import ReferenceUpdate
from rl_plugins.config.models import CriticConfig, OptimizerConfig, RewardModelConfig, TeacherConfig
from rl_plugins.config.sampling import SamplingConfig, Schedule
from rl_plugins.data.experience import Experience
from rl_plugins.errors import ConfigError, DataError, RewardError
from rl_plugins.models.scalar_head import load_scalar_head
from rl_plugins.models.tiny import build_model, build_tokenizer
from rl_plugins.rewards.records import Score
from rl_plugins.stages.critic_training import explained_variance
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.stages.rollouts import ModelScorer
from rl_plugins.strategies.contract import Strategy
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.loops import for_each
from rl_plugins.tests.stages import canned, canned_preferences


class Keeping(PolicyOptimization):
    """A stage that records the experience of every step, and the metrics."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.collected: list[Experience] = []
        self.metrics: list[dict[str, float]] = []

    def update(self, experience: Experience) -> dict[str, float]:
        self.collected.append(experience)
        return super().update(experience)

    def track(self, metrics: Any) -> None:
        self.metrics.append(dict(metrics))


def train(
    algorithm: Algorithm,
    steps: int = 1,
    prompts: list[str] | None = None,
    callbacks: Any = (),
    stage_class: type[Keeping] = Keeping,
    **options: Any,
) -> Keeping:
    stage = stage_class(
        build_model(hidden_size=32, intermediate_size=48, initializer_range=0.2),
        tokenizer=canned.tokenizer,
        algorithm=algorithm,
        **{
            "scorer": canned.CannedScorer(),
            "sampling": SamplingConfig(max_tokens=20, num_samples=3),
            "reference": canned.other_model(),
            "optimizer": OptimizerConfig(lr=0.01),
            **options,
        },
    )
    strategy = SingleDeviceRolloutStrategy(rollout=canned.CannedRollout())
    trainer = canned.quiet_trainer(strategy, callbacks=list(callbacks))
    trainer.fit(stage, canned.loader([canned.prompt_batch(prompts or canned.PROMPTS)] * steps))
    return stage


def filled(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


# Dynamic sampling -----------------------------------------------------------------------------------------------


def test_group_filter_replaces_uniform_groups_by_groups_of_the_next_prompts() -> None:
    stage = train(Algorithm(group_filter=GroupFilter()))
    (experience,) = stage.collected
    # 4+4 is left out; the fourth group comes from the second draw.
    asked = [message[0]["content"] for message in experience.columns["prompt"][::3]]
    assert asked == ["1+1", "12+30", "100+1", "1+1"]
    assert experience.groups.unique().numel() == 4
    assert stage.metrics[0]["train/generation_batches"] == 2
    # Metrics of samples count all samples, with the filtered samples.
    assert stage.metrics[0]["train/uniform_groups"] == pytest.approx(3 / 11)


def test_group_filter_raises_after_max_batches_without_enough_groups() -> None:
    with pytest.raises(DataError, match=r"6 prompts gave 0 groups .* the step needs 2"):
        train(Algorithm(group_filter=GroupFilter(max_batches=3)), prompts=["4+4", "4+4"])


def test_group_filter_with_oversampling_trains_on_a_share_of_the_prompts() -> None:
    stage = train(Algorithm(group_filter=GroupFilter(oversampling=2)))
    assert len(stage.collected[0]) == 2 * 3 and "train/generation_batches" not in stage.metrics[0]


def test_group_filter_refuses_a_metric_that_the_reward_does_not_return() -> None:
    with pytest.raises(
        RewardError, match=r"group_filter\.metric names 'luck', and the reward function returns correct, format"
    ):
        train(Algorithm(group_filter=GroupFilter(metric="luck")))


# Rewards --------------------------------------------------------------------------------------------------------


def test_reward_shaping_changes_the_scores_and_not_the_logged_reward() -> None:
    shaping = RewardShaping(overlong=OverlongPenalty(max_tokens=10, buffer_tokens=5, factor=2.0))
    plain, shaped = train(Algorithm()), train(Algorithm(shaping=shaping))
    lengths_B = shaped.collected[0].response_lengths
    penalty_B = -2 * ((lengths_B - 5).clamp(0, 5) / 5)
    torch.testing.assert_close(filled(shaped.collected[0].scores), filled(plain.collected[0].scores) + penalty_B)
    assert shaped.metrics[0]["train/reward"] == plain.metrics[0]["train/reward"]


def test_positive_nll_imitates_by_the_scores_before_shaping() -> None:
    algorithm = Algorithm(shaping=RewardShaping(clip=(0.0, 0.4)))
    imitating = replace(algorithm, modifiers=LossModifiers(positive_nll=1.0))
    plain, without, stage = (train(choice) for choice in (Algorithm(), algorithm, imitating))
    (experience,) = stage.collected
    assert filled(experience.scores).max() == pytest.approx(0.4)
    assert torch.equal(filled(experience.is_positive), filled(plain.collected[0].scores) > 0.5)
    # The log-probs of the random policy are far below -1.
    assert stage.metrics[0]["train/loss"] > without.metrics[0]["train/loss"] + 1


def test_remax_takes_the_score_of_the_greedy_response_as_baseline() -> None:
    class Shows(Keeping):
        def on_train_start(self) -> None:
            super().on_train_start()
            self.shown_samples.limit = 100

    stage = train(Algorithm(advantage="remax"), stage_class=Shows)
    (experience,) = stage.collected
    firsts = [canned.score(canned.RESPONSES[prompt][0]) for prompt in canned.PROMPTS]
    torch.testing.assert_close(filled(experience.baseline_scores)[::3], torch.tensor(firsts))
    # The samples for readers are those of training.
    assert len(stage.shown_samples.training) == len(experience)
    assert all(row["rewards"]["correct"] == row["score"] for row in stage.shown_samples.training if not row["failure"])


def test_remax_starts_the_greedy_response_with_the_seed_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[int, dict[int, str]] = {3: {}, 1: {}}
    generate = canned.CannedRollout.generate

    def noting(engine: Any, prompts: list[list[int]], sampling: SamplingConfig, seeds_of_prompts: list[int]) -> Any:
        seeds[sampling.num_samples] |= zip(seeds_of_prompts, map(canned.tokenizer.decode, prompts), strict=True)
        return generate(engine, prompts, sampling, seeds_of_prompts)

    monkeypatch.setattr(canned.CannedRollout, "generate", noting)
    # Each step draws two batches of four prompts, so the number of a batch is not the step.
    train(Algorithm(advantage="remax", group_filter=GroupFilter()), steps=2)
    assert seeds[1] == seeds[3] and len(seeds[3]) == 2 * 2 * 4


def test_remax_counts_a_greedy_response_without_a_reward() -> None:
    class FailsOnGreedy(canned.CannedScorer):
        def score(self, requests: Any) -> list[Score]:
            first, *others = super().score(requests)
            is_greedy = len(others) < len(canned.PROMPTS)
            failure = Score(None, {"judge/cost": 2.0}, failure="raised", message="no")
            return [failure if is_greedy else first, *others]

    scorers = canned.CannedScorer(), FailsOnGreedy()
    plain, failing = (train(Algorithm(advantage="remax"), scorer=scorer).metrics[0] for scorer in scorers)
    assert failing["train/reward_raised"] == plain["train/reward_raised"] + 1
    assert failing["train/judge/cost"] == 2.0


def save_reward_model(folder: Path) -> Any:
    model: Any = load_scalar_head(canned.other_model(), dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    canned.tokenizer.save_pretrained(folder)
    return model


def test_reward_model_scores_are_added_to_the_scores_of_the_rules(tmp_path: Path) -> None:
    model = save_reward_model(tmp_path)

    def scores(weight: float, rule_weight: float) -> Tensor:
        config = RewardModelConfig(str(tmp_path), weight, rule_weight)
        return filled(train(Algorithm(), reward_model=config).collected[0].scores)

    rules, of_model = filled(train(Algorithm()).collected[0].scores), scores(1.0, 0.0)
    # One number for each response, read at its last token, with any tokens around.
    prompt, response = canned.tokenizer.encode("12+30"), canned.tokenizer.encode("42.")
    alone = model.eval()(torch.tensor([prompt + response])).logits[0, -1, 0]
    torch.testing.assert_close(of_model[3], alone.detach())
    assert of_model.unique().numel() == len(of_model)
    torch.testing.assert_close(scores(3.0, 0.5), 3 * of_model + 0.5 * rules)


def test_reward_model_scores_a_step_whose_responses_are_all_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = save_reward_model(tmp_path), canned.tokenizer.encode("1+1")
    monkeypatch.setitem(canned.RESPONSES, "1+1", [""] * 3)
    config = RewardModelConfig(str(tmp_path), weight=1.0, rule_weight=0.0)
    (experience,) = train(Algorithm(), prompts=["1+1"], reward_model=config).collected
    assert experience.responses.shape == (3, 0)
    # The score of an empty response is read at the end of the prompt.
    alone = model.eval()(torch.tensor([prompt])).logits[0, -1, 0].detach()
    torch.testing.assert_close(filled(experience.scores), alone.expand(3))


class WithoutNumbersScorer(ModelScorer):
    """Reward model scorer with a score of NaN for every fourth sample."""

    @override
    def _model_scores(self, samples: Experience) -> Tensor:
        scores_B = torch.arange(float(len(samples)))
        scores_B[::4] = torch.nan
        return scores_B


class WithoutNumbers(Keeping):
    """A stage whose reward model scores every fourth sample NaN."""

    @override
    def make_parts(self, strategy: Strategy) -> None:
        super().make_parts(strategy)
        self.rollouts._models = [
            WithoutNumbersScorer(model.name, model.field, model.config, model.passes) for model in self.rollouts._models
        ]


def test_samples_without_a_finite_reward_model_score_are_masked_and_counted(tmp_path: Path) -> None:
    save_reward_model(tmp_path)
    config = RewardModelConfig(str(tmp_path), max_failure_rate=0.25)
    stage = train(Algorithm(), stage_class=WithoutNumbers, reward_model=config)
    (experience,) = stage.collected
    assert experience.valid.tolist() == ([False] + [True] * 3) * 3
    assert not experience.response_mask[::4].any() and filled(experience.scores).isfinite().all()
    # The reward of one of the three samples had failed before.
    assert stage.metrics[0]["train/reward_not_finite"] == 2
    assert all(parameter.isfinite().all() for parameter in stage.policy.parameters())
    with pytest.raises(RewardError, match=r"2 of 12 rewards failed.*the reward model: its score is nan"):
        train(Algorithm(), stage_class=WithoutNumbers, reward_model=RewardModelConfig(str(tmp_path)))


def test_reward_model_without_a_scalar_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no scalar head"):
        train(Algorithm(), reward_model=RewardModelConfig(canned.other_model()))


def test_component_scores_have_the_reward_components_of_the_algorithm() -> None:
    algorithm = Algorithm(advantage="gdpo", reward_components=["format", "correct"])
    (experience,) = train(algorithm).collected
    components_BK = filled(experience.component_scores)
    assert components_BK.shape == (12, 2) and set(components_BK[:, 0].tolist()) == {0.0, 1.0}
    torch.testing.assert_close(components_BK[:, 1], filled(experience.scores))


def test_gdpo_refuses_a_reward_model() -> None:
    algorithm = Algorithm(advantage="gdpo", reward_components=["format"])
    with pytest.raises(ConfigError, match=r"gdpo compares the components .* leave reward_model out"):
        train(algorithm, reward_model=RewardModelConfig("model"))


class FailingScorer:
    """Scorer whose rewards fail."""

    def score(self, requests: Any) -> list[Score]:
        return [Score(None, failure="raised", message="!") for _ in requests]


@for_each("placement", ["loss", "reward"])
def test_coefficients_stay_in_a_step_whose_rewards_have_failed(placement: Any) -> None:
    algorithm = Algorithm(
        kl=KLConfig(0.1, placement, "k1", target=0.1), entropy=EntropyConfig(0.2, target=0.5, rate=0.1)
    )
    stage = train(algorithm, scorer=FailingScorer())
    assert (stage.kl_controller.coefficient, stage.entropy_controller.coefficient) == (0.1, 0.2)
    assert not {"train/kl", "train/entropy", "train/kl_coefficient"} & stage.metrics[0].keys()


# The gap between sampler and trainer ----------------------------------------------------------------------------


def test_rollout_correction_weighs_and_rejects_before_advantages() -> None:
    stage = train(Algorithm(correction="token_tis"))
    (experience,) = stage.collected
    weights_BT, mask_BT = filled(experience.rollout_weights), experience.response_mask.bool()
    gap_BT = filled(experience.old_log_probs) - experience.rollout_log_probs
    torch.testing.assert_close(weights_BT[mask_BT], gap_BT.exp().clamp(max=2.0)[mask_BT])
    assert {"train/rollout/ess", "train/rollout/chi2_token", "train/rollout/k3"} <= stage.metrics[0].keys()
    assert stage.metrics[0]["train/rollout/rejected"] == 0
    # The rollout log-probs are -1 for each token, far from the log-probs of the policy: all samples are rejected.
    rejecting = train(Algorithm(correction="geo_rs"))
    assert rejecting.metrics[0]["train/rollout/rejected"] == 1 and not rejecting.collected[0].response_mask.any()
    # The gap is that of all sampled tokens.
    plain = train(Algorithm())
    for name in ("train/rollout_gap", "train/rollout_gap_max"):
        assert rejecting.metrics[0][name] == pytest.approx(plain.metrics[0][name]) and plain.metrics[0][name] > 0
    assert filled(rejecting.collected[0].rejected).tolist() == experience.response_mask.any(dim=-1).tolist()


@for_each("truncation", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"vllm": {"min_tokens": 1}}])
def test_rollout_log_probs_are_refused_where_sampling_truncates_the_distribution(truncation: dict[str, Any]) -> None:
    sampling = SamplingConfig(max_tokens=20, num_samples=3, **truncation)
    for options in (
        {"algorithm": Algorithm(correction="token_tis")},
        {"algorithm": Algorithm(correction="bypass")},
        {"algorithm": Algorithm(modifiers=LossModifiers(off_policy_mask=0.1))},
        {"algorithm": Algorithm(), "schedule": Schedule(1)},
    ):
        with pytest.raises(
            ConfigError, match=rf"sampling.{next(iter(truncation))}[=.].*: training compares .*leave the option out"
        ):
            train(sampling=sampling, **options)
    train(Algorithm(), sampling=sampling)


def test_rollout_correction_bypass_takes_the_ratio_to_the_rollout() -> None:
    plain, bypass = train(Algorithm()), train(Algorithm(correction=RolloutCorrection(bypass=True)))
    assert plain.metrics[0]["train/ppo_kl"] == 0 != bypass.metrics[0]["train/ppo_kl"]
    assert bypass.collected[0].old_log_probs is None


def test_gap_with_bypass_is_the_gap_of_the_first_update() -> None:
    plain, bypass = (train(Algorithm(correction=name), updates_per_step=2) for name in ("none", "bypass"))
    first = plain.collected[0].chunk(2)[0]
    gap_N = (filled(first.old_log_probs) - first.rollout_log_probs).abs()[first.response_mask.bool()]
    assert bypass.metrics[0]["train/rollout_gap"] == pytest.approx(gap_N.mean().item())
    assert bypass.metrics[0]["train/rollout_gap_max"] == pytest.approx(gap_N.max().item())


def test_rewards_and_advantages_with_bypass_are_of_the_policy_before_the_update() -> None:
    algorithm = Algorithm(advantage="optimal_token_baseline", kl=KLConfig(0.1, "reward"))
    plain, bypass = (train(replace(algorithm, correction=name)).collected[0] for name in ("none", "bypass"))
    for field in ("old_log_probs", "token_level_rewards", "advantages"):
        assert torch.equal(getattr(plain, field), getattr(bypass, field)), field


# The critic -----------------------------------------------------------------------------------------------------


def test_critic_has_a_separate_optimizer_and_the_policy_waits_for_critic_warmup() -> None:
    critic = CriticConfig(canned.other_model(), OptimizerConfig(lr=0.5, warmup_steps=1), warmup_steps=2)
    stage = train(Algorithm(advantage="gae"), steps=3, critic=critic, optimizer=OptimizerConfig(lr=0.1, warmup_steps=1))
    assert [row["train/critic/lr"] for row in stage.metrics] == [0.25, 0.5, 0.5]
    # The policy's schedule waits with the policy.
    assert [row.get("train/lr") for row in stage.metrics] == [None, None, 0.05]
    assert ["train/loss" in row for row in stage.metrics] == [False, False, True]
    assert all(row["train/critic/gradient_norm"] > 0 for row in stage.metrics)
    # A new critic gives 0 everywhere, and explains nothing.
    assert not filled(stage.collected[0].values).any() and filled(stage.collected[1].values).any()
    assert stage.metrics[0]["train/critic/explained_variance"] == pytest.approx(0, abs=1e-6)


def test_kl_coefficient_waits_with_the_policy_for_critic_warmup() -> None:
    algorithm = Algorithm(advantage="gae", kl=KLConfig(0.1, "reward", target=1e-6, horizon=100))
    stage = train(algorithm, steps=3, critic=CriticConfig(canned.other_model(), warmup_steps=2))
    coefficients = [row["train/kl_coefficient"] for row in stage.metrics]
    assert coefficients[:2] == [0.1, 0.1] and coefficients[2] != 0.1
    assert all("train/kl" in row for row in stage.metrics)


def test_explained_variance_is_1_for_perfect_values_and_nan_for_constant_returns() -> None:
    returns, mask = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1, 1, 0]])

    def of(values: list[float]) -> float:
        return explained_variance(torch.tensor([values]), returns, mask, lambda sums: sums)

    assert of([1.0, 2.0, 0.0]) == pytest.approx(1)
    assert of([7.0, 7.0, 0.0]) == pytest.approx(0)
    assert of([2.0, 1.0, 0.0]) == pytest.approx(-3)
    same = explained_variance(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2), lambda sums: sums)
    assert same != same


def test_critic_without_a_model_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs values_BT: name the model that the critic starts from"):
        train(Algorithm(advantage="gae"))


# Entropy, modifiers, reference ----------------------------------------------------------------------------------


def test_entropy_bonus_raises_entropy_and_the_coefficient_follows_the_target() -> None:
    bonus = Algorithm(advantage_options={"scale": "none"}, entropy=EntropyConfig(0.5, target=100.0, rate=0.1))
    with_bonus, without = train(bonus, steps=4), train(replace(bonus, entropy=EntropyConfig()), steps=4)
    assert with_bonus.metrics[-1]["train/entropy"] > without.metrics[-1]["train/entropy"]
    assert with_bonus.entropy_controller.coefficient == pytest.approx(0.9)
    checkpoint: dict[str, Any] = {}
    with_bonus.on_save_checkpoint(checkpoint)
    resumed = Keeping(
        build_model(), tokenizer=canned.tokenizer, scorer=canned.CannedScorer(), sampling=with_bonus.sampling,
        algorithm=bonus,
    )  # fmt: skip
    resumed.on_load_checkpoint(checkpoint)
    assert resumed.entropy_controller.coefficient == with_bonus.entropy_controller.coefficient


def test_choose_tokens_keeps_the_tokens_with_the_highest_entropy() -> None:
    algorithm = Algorithm(modifiers=LossModifiers(top_entropy=0.25))
    stage = train(algorithm)
    (experience,) = stage.collected
    stage.learner._choose_tokens(experience, stage.step, 1)
    chosen_BT, mask_BT = filled(experience.loss_mask).bool(), experience.response_mask.bool()
    entropy_BT = filled(experience.entropy)
    assert 0.2 <= chosen_BT.sum() / mask_BT.sum() <= 0.35 and not (chosen_BT & ~mask_BT).any()
    assert entropy_BT[chosen_BT].min() >= entropy_BT[mask_BT & ~chosen_BT].max()


def test_clip_cov_selects_other_random_tokens_in_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    selections: list[Tensor] = []
    select = Algorithm.select

    def recorded(self: Algorithm, *arguments: Any, **options: Any) -> Tensor | None:
        selections.append(filled(select(self, *arguments, **options)))
        return selections[-1]

    monkeypatch.setattr(Algorithm, "select", recorded)
    band = {"share": 0.3, "low": -100.0, "high": 100.0}
    train(Algorithm(policy_loss="clip_cov", selection_options=band), passes_per_step=2)
    first_BT, second_BT = selections
    assert first_BT.sum() == second_BT.sum() > 1 and not torch.equal(first_BT, second_BT)


@for_each(("keep", "expected"), [(0.0, 1.0), (0.75, 0.25)])
def test_reference_update_moves_the_reference_towards_the_policy(keep: float, expected: float) -> None:
    algorithm = Algorithm(kl=KLConfig(0.1))
    still = train(algorithm, steps=2)
    moving = train(algorithm, steps=2, callbacks=[ReferenceUpdate(every=2, keep=keep)])
    for policy, start, moved in zip(
        moving.policy.parameters(), still.reference.parameters(), moving.reference.parameters(), strict=True
    ):
        torch.testing.assert_close(moved, start + expected * (policy - start))


def test_reference_update_without_a_reference_or_with_bad_options_is_refused() -> None:
    with pytest.raises(ConfigError, match="the stage has no reference model"):
        train(Algorithm(), callbacks=[ReferenceUpdate()])
    for wrong, message in (({"every": 0}, r"every=0: must be at least 1"), ({"keep": 1.0}, r"keep=1\.0")):
        with pytest.raises(ConfigError, match=message):
            ReferenceUpdate(**wrong)


def test_models_with_another_vocabulary_than_the_policy_are_refused(tmp_path: Path) -> None:
    folder = str(tmp_path / "other")
    build_model().save_pretrained(folder)
    tokenizer: Any = build_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(folder)
    pairs = canned_preferences.batch_of(True, [0, 1])
    stage = canned_preferences.stage_of(canned.OwnPolicy(), reference=folder)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("reward model", lambda: train(Algorithm(), reward_model=RewardModelConfig(folder))),
        ("reference", lambda: train(Algorithm(kl=KLConfig(0.1)), reference=folder)),
        (
            "teacher",
            lambda: train(
                Algorithm(advantage="reverse_kl"),
                teacher=TeacherConfig(paths={"canned": canned.other_model(), "default": folder}),
            ),
        ),
        ("reference", lambda: canned_preferences.fit(stage, [pairs], 0, 1)),
    ]
    for role, run in cases:
        with pytest.raises(ConfigError, match=f"the {role} .* has another vocabulary than the policy's"):
            run()
