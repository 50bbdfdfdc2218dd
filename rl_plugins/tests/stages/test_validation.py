"""Validation by generation: the metrics of one and of several samples for each prompt, on one rank and on two."""

from __future__ import annotations

from typing import Any

import pytest
from typing_extensions import override

from rl_plugins.config.sampling import SamplingConfig
from rl_plugins.evaluation.measures import best_at
from rl_plugins.ranks import Ranks
from rl_plugins.stages.policy_optimization import PolicyOptimization
from rl_plugins.strategies.single_device import SingleDeviceRolloutStrategy
from rl_plugins.tests.stages import canned

ENDS = ("", "_low", "_high")


class SecondRank(Ranks):
    """The second of two ranks; the first has measured a prompt of another data source."""

    @override
    def gather(self, value: Any) -> list[Any]:
        return [({-1: ("elsewhere", {"mean@1": 0.125})}, {"elsewhere": (0.5, 1)}), value]


class SecondOfTwo(SingleDeviceRolloutStrategy):
    """The strategy of the second rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ranks = SecondRank()


def validate(
    num_samples: int, strategy: type[SingleDeviceRolloutStrategy] = SingleDeviceRolloutStrategy, step: int = 0
) -> Any:
    stage = PolicyOptimization(
        canned.OwnPolicy(),
        tokenizer=canned.tokenizer,
        scorer=canned.CannedScorer(),
        sampling=SamplingConfig(max_tokens=20, num_samples=3),
        eval_sampling=SamplingConfig(max_tokens=20, num_samples=num_samples),
    )
    stage.step, metrics = step, canned.metrics_of(stage)
    trainer = canned.quiet_trainer(strategy(rollout=canned.CannedRollout()), precision="64-true")
    # Two batches, as a loader cuts a rank's share.
    batches = canned.loader([canned.prompt_batch(canned.PROMPTS[:3]), canned.prompt_batch(canned.PROMPTS[3:])])
    trainer.validate(stage, batches, verbose=False)
    return stage, metrics


def scores(size: int) -> list[list[float | None]]:
    return [[canned.score(response) for response in responses[:size]] for responses in canned.RESPONSES.values()]


def mean(values: Any) -> float:
    counted = [value for value in values if value is not None]
    return sum(counted) / len(counted)


def test_validation_with_one_sample_logs_the_mean_of_each_data_source() -> None:
    _, metrics = validate(1)
    assert {name for name in metrics if "canned" in name} == {f"val/canned/mean_at_1{end}" for end in ENDS}
    assert metrics["val/canned/mean_at_1"] == pytest.approx(mean(row[0] for row in scores(1)))
    assert metrics["val/canned/mean_at_1"] == pytest.approx(metrics["val/reward"])
    assert metrics["val/canned/mean_at_1_low"] < metrics["val/reward"] < metrics["val/canned/mean_at_1_high"]


def test_validation_with_several_samples_logs_best_and_majority() -> None:
    stage, metrics = validate(3)
    names = {f"val/canned/{name}_at_3{end}" for name in ("mean", "best", "maj") for end in ENDS}
    assert {name for name in metrics if "canned" in name} == names
    # The metrics leave out the failed sample of a prompt, and the metrics of three samples leave out the prompt.
    whole: list[Any] = [row for row in scores(3) if None not in row]
    assert len(whole) == 3
    counted = [response for row in canned.RESPONSES.values() for response in row if "!" not in response]
    assert metrics["val/rewards/format"] == pytest.approx(mean(response.isdigit() for response in counted))
    assert metrics["val/canned/mean_at_3"] == pytest.approx(mean(mean(row) for row in scores(3)))
    assert metrics["val/canned/best_at_3"] == pytest.approx(mean(best_at(row, 3) for row in whole))
    failures = [score for row in scores(3) for score in row if score is None]
    assert metrics["val/reward_failures"] == len(failures) > 0
    assert len(stage.shown_samples.validation) == 12


def test_validation_counts_the_prompts_of_all_ranks() -> None:
    _, metrics = validate(1, SecondOfTwo)
    assert metrics["val/elsewhere/mean_at_1"] == 0.125 and metrics["val/rewards/elsewhere"] == 0.5
    assert metrics["val/canned/mean_at_1"] == pytest.approx(mean(row[0] for row in scores(1)))


def test_validations_after_different_steps_have_the_same_seed_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    generate = canned.CannedRollout.generate

    def noting(engine: Any, prompts: list[list[int]], sampling: SamplingConfig, seeds_of_prompts: list[int]) -> Any:
        seeds.extend(seeds_of_prompts)
        return generate(engine, prompts, sampling, seeds_of_prompts)

    monkeypatch.setattr(canned.CannedRollout, "generate", noting)
    for step in (0, 7):
        validate(1, step=step)
    assert seeds[:4] == seeds[4:] and len(set(seeds)) == 4
